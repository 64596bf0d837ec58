"""Checks the role's ``engine:`` mapping and makes DeepSpeed's configuration from it.

The mapping is passed on as it is. Its names are checked first, because DeepSpeed ignores a name
that it does not know, or ends with an error of pydantic. So this module lists the names that may be
passed. It imports no DeepSpeed, so that ``g-core check`` knows them too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gcore_language.engine_arguments import EngineArguments, sentence

from gcore_core.contract.errors import ConfigError
from gcore_deepspeed.config import DeepSpeedTrainerConfig

#: Sections and settings of DeepSpeed's configuration that are passed on.
_PASSED = (
    "comms_logger",
    "communication_data_type",
    "csv_monitor",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "log_level",
    "memory_breakdown",
    "prescale_gradients",
    "steps_per_print",
    "tensorboard",
    "timers",
    "wall_clock_breakdown",
    "wandb",
    "zero_optimization",
)
#: Section of DeepSpeed's configuration -> its settings, as of DeepSpeed 0.19.8.
SECTIONS = {
    "comms_logger": ("debug", "enabled", "prof_all", "prof_ops", "verbose"),
    "csv_monitor": ("enabled", "job_name", "output_path"),
    "flops_profiler": (
        "detailed",
        "enabled",
        "module_depth",
        "output_file",
        "profile_step",
        "recompute_fwd_factor",
        "top_modules",
    ),
    "tensorboard": ("enabled", "job_name", "output_path"),
    "timers": ("throughput",),
    "wandb": ("enabled", "group", "project", "team"),
    "zero_optimization": (
        "allgather_bucket_size",
        "allgather_partitions",
        "compute_grad_norm",
        "contiguous_gradients",
        "elastic_checkpoint",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "leaf_module",
        "legacy_stage1",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory",
        "stage",
        "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
        "zenflow",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    ),
}
#: setting of DeepSpeed -> where this plugin takes it from instead
_SETTINGS = {
    "bf16": "config.dtype",
    "data_types": "config.dtype",
    "gradient_clipping": "config.clip_grad_norm",
    "optimizer": "config.learning_rate, betas, eps and weight_decay",
    "scheduler": "config.schedule",
    "torch_autocast": "config.dtype",
    "zero_optimization.allgather_bucket_size": "config.bucket_elements",
    "zero_optimization.offload_optimizer": "config.offload_optimizer",
    "zero_optimization.offload_param": "config.offload_params",
    "zero_optimization.reduce_bucket_size": "config.bucket_elements",
    "zero_optimization.stage": "config.stage",
}
_BATCH = "micro-batches follow from config.budget_tokens, and an update takes as many as it needs"
_COMPILES = "it needs kernels that DeepSpeed compiles when it starts"
_RANKS = "the ranks of this trainer share data alone"
#: setting of DeepSpeed -> why it cannot be chosen
_FIXED = {
    "activation_checkpointing": "config.gradient_checkpointing uses that of transformers",
    "aio": _COMPILES,
    "checkpoint": "config.checkpoint says how state is saved",
    "compile": "batches differ in shape",
    "fp16": "gradients would need a loss scale; config.dtype may be bfloat16",
    "gradient_accumulation_steps": _BATCH,
    "gradient_allreduce_op": "the plugin adds gradients up over the ranks",
    "hybrid_engine": "generation has a role of its own",
    "managed_gradient_accumulation": _BATCH,
    "pipeline": _RANKS,
    "sequence_parallel_size": _RANKS,
    "tensor_parallel": _RANKS,
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "zero_allow_untested_optimizer": "the optimizer is torch's AdamW",
    "zero_force_ds_cpu_optimizer": _COMPILES,
    "zero_optimization.compute_grad_norm": "every update reports its gradient norm",
    "zero_optimization.elastic_checkpoint": "config.checkpoint says how state is saved",
    "zero_optimization.zenflow": "it would step with old gradients",
    "zero_optimization.zero_quantized_gradients": _COMPILES,
    "zero_optimization.zero_quantized_nontrainable_weights": _COMPILES,
    "zero_optimization.zero_quantized_weights": _COMPILES,
}


_ARGUMENTS = EngineArguments(
    settings=_SETTINGS,
    fixed=_FIXED,
    unknown="DeepSpeed takes no setting",
    listed="They are the fields of deepspeed.runtime.zero.config.DeepSpeedZeroConfig.",
)


def check_engine(engine: Mapping[str, Any], known_zero: Collection[str], role: str) -> None:
    """Raises ConfigError for a name that may not stand under ``engine:``.

    DeepSpeed may not know it, this plugin may take it from ``config:``, or it may be fixed.

    known_zero: the names that DeepSpeed knows under ``zero_optimization``.
    """
    for error in _refusals(engine, {**SECTIONS, "zero_optimization": known_zero}, role):
        raise error


def problems(engine: Mapping[str, Any], role: str) -> Iterator[str]:
    """Yields one sentence for every name that ``check_engine`` refuses; see ``gcore_check``.

    The names under ``zero_optimization`` are those of DeepSpeed 0.19.8.
    """
    for error in _refusals(engine, SECTIONS, role):
        yield sentence(error)


def _refusals(
    engine: Mapping[str, Any], sections: Mapping[str, Collection[str]], role: str
) -> Iterator[ConfigError]:
    """Yields an error for every name that may not stand under ``engine:`` or in a section of it."""
    yield from _ARGUMENTS.refusals(engine, _PASSED, role)
    for section, known_names in sections.items():
        names = engine.get(section, {})
        if isinstance(names, Mapping):
            yield from _ARGUMENTS.refusals(names, known_names, role, f"{section}.")
        else:
            yield ConfigError("must be a mapping.", where=f"roles.{role}.engine.{section}")


def deepspeed_config(
    config: DeepSpeedTrainerConfig, engine: Mapping[str, Any], *, pin_memory: bool
) -> dict[str, Any]:
    """Returns the mapping that ``deepspeed.initialize`` takes.

    pin_memory: whether offloaded tensors lie in pinned host memory.
    """
    zero: dict[str, Any] = {
        "stage": config.stage,
        "reduce_bucket_size": config.bucket_elements,
        "allgather_bucket_size": config.bucket_elements,
    }
    host = {"device": "cpu", "pin_memory": pin_memory}
    if config.offload_optimizer:
        zero["offload_optimizer"] = host
    if config.offload_params:
        zero["offload_param"] = host
    return {
        # DeepSpeed insists on a number, and does nothing with it here
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,  # an update is complete when step() is called
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": True},
        "timers": {"throughput": {"enabled": False}},
        **engine,
        "zero_optimization": {**engine.get("zero_optimization", {}), **zero},
    }
