"""Refuses the role's ``engine:`` mapping: nothing is passed on to Megatron-Core as it is.

Megatron-Core has no one configuration: a name is an argument of its model, of its optimizer, of its
groups, or of the training loop of Megatron-LM, which is not there. So what can be chosen is a
setting under ``config:``, and the refusal of a name that this module knows says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from gcore_language.engine_arguments import EngineArguments, sentence

from gcore_core.contract.errors import ConfigError
from gcore_megatron.config import MegatronTrainerConfig

_CHECKPOINTING = "config.gradient_checkpointing"
#: argument of Megatron-Core or Megatron-LM -> the setting of this plugin that it is
SETTINGS = {
    "adam_beta1": "config.betas",
    "adam_beta2": "config.betas",
    "adam_eps": "config.eps",
    "async_save": "config.checkpoint",
    "bf16": "config.dtype",
    "clip_grad": "config.clip_grad_norm",
    "context_parallel_size": "config.context_parallel",
    "deterministic_mode": "run.deterministic",
    "dist_ckpt_format": "config.checkpoint",
    "expert_model_parallel_size": "config.expert_parallel",
    "load": "model.path",
    "lr": "config.learning_rate",
    "lr_decay_style": "config.schedule",
    "lr_warmup_iters": "config.warmup_updates",
    "min_lr": "config.final_fraction",
    "moe_aux_loss_coeff": "config.router_aux_loss",
    "moe_enable_routing_replay": "config.router_replay",
    "overlap_grad_reduce": "config.overlap_grad_reduce",
    "params_dtype": "config.dtype",
    "pipeline_dtype": "config.dtype",
    "pipeline_model_parallel_size": "config.pipeline_parallel",
    "recompute_activations": _CHECKPOINTING,
    "recompute_granularity": _CHECKPOINTING,
    "recompute_method": _CHECKPOINTING,
    "recompute_num_layers": _CHECKPOINTING,
    "seed": "run.seed",
    "sequence_parallel": "config.sequence_parallel",
    "tensor_model_parallel_size": "config.tensor_parallel",
    "tokenizer_model": "model.path",
    "use_distributed_optimizer": "config.distributed_optimizer",
    "weight_decay": "config.weight_decay",
}
SETTINGS |= {
    setting.name: f"config.{setting.name}"
    for setting in fields(MegatronTrainerConfig)
    if setting.name != "lora"
}
_BATCH = "micro-batches follow from config.budget_tokens, and an update takes as many as it needs"
_BALANCE = "config.router_aux_loss balances the choices of a whole update"
_DROPS = "no token is dropped, since its log-prob would be another than the generator's"
_FUSED = "it needs Transformer Engine or Apex, which this plugin does without"
_MODEL = "the model's config.json says it"
_STAGES = "stages are not interleaved here"
#: argument of Megatron-Core or Megatron-LM -> why it cannot be chosen
_FIXED = (
    {
        "attention_backend": "attention is torch's fused kernel",
        "expert_tensor_parallel_size": "an expert is whole on its slot",
        "moe_router_dtype": "routers compute as transformers' do: logits in the model's dtype, "
        "probabilities in float32",
        "moe_shared_expert_intermediate_size": "no model with shared experts is built here",
        "moe_token_dispatcher_type": "tokens are sent from each slot to each (alltoall)",
        "data_parallel_size": "`slots` over the product of the parallel sizes gives it",
        "fp16": "gradients would need a loss scale; config.dtype may be bfloat16",
        "grad_reduce_in_fp32": "gradients are always summed in float32",
        "optimizer": "it is AdamW",
        "overlap_param_gather": "weights are exported between updates, so they must be whole then",
        "use_cpu_initialization": "weights are read, not drawn",
    }
    | dict.fromkeys(("attention_dropout", "hidden_dropout"), "log-probs must repeat")
    | dict.fromkeys(
        ("global_batch_size", "micro_batch_size", "num_microbatches", "seq_length"), _BATCH
    )
    | dict.fromkeys(("moe_router_load_balancing_type", "moe_z_loss_coeff"), _BALANCE)
    | dict.fromkeys(
        (
            "moe_expert_capacity_factor",
            "moe_pad_expert_input_to_capacity",
            "moe_token_drop_policy",
        ),
        _DROPS,
    )
    | dict.fromkeys(
        (
            "apply_rope_fusion",
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "fp8",
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
            "moe_grouped_gemm",
            "moe_permute_fusion",
            "moe_router_fusion",
            "tp_comm_overlap",
            "transformer_impl",
        ),
        _FUSED,
    )
    | dict.fromkeys(
        (
            "ffn_hidden_size",
            "hidden_size",
            "moe_ffn_hidden_size",
            "moe_layer_freq",
            "moe_router_pre_softmax",
            "moe_router_score_function",
            "moe_router_topk",
            "num_attention_heads",
            "num_layers",
            "num_moe_experts",
            "num_query_groups",
            "rotary_base",
        ),
        _MODEL,
    )
    | dict.fromkeys(
        (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "virtual_pipeline_model_parallel_size",
        ),
        _STAGES,
    )
)
_KNOWN = sorted({setting.name for setting in fields(MegatronTrainerConfig)} - {"lora"})

_ARGUMENTS = EngineArguments(
    settings=SETTINGS,
    fixed=_FIXED,
    unknown="nothing is passed on to Megatron-Core as it is, and this trainer has no setting",
    listed=f"Its settings stand under config: {', '.join(_KNOWN)}.",
)


def check_engine(engine: Mapping[str, Any], role: str) -> None:
    """Raises ConfigError for the first name under ``engine:``."""
    for error in _refusals(engine, role):
        raise error


def problems(engine: Mapping[str, Any], role: str) -> Iterator[str]:
    """Yields one sentence for every name under ``engine:``; see ``gcore_check``."""
    for error in _refusals(engine, role):
        yield sentence(error)


def _refusals(engine: Mapping[str, Any], role: str) -> Iterator[ConfigError]:
    return _ARGUMENTS.refusals(engine, (), role)
