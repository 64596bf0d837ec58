"""Starts vLLM's engine in this process.

vLLM reads its environment variables when it is imported, so they are set before that.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from gcore_language.model_files import ModelFiles
from gcore_language.model_places import position_limit
from gcore_language.pretrained import check_for_engine
from gcore_language.prompts import first_lines
from gcore_language.settings import threads_of

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError, PluginBroken
from gcore_vllm.adapter import Adapter
from gcore_vllm.arguments import check_engine
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.images import Showing, register_models

_GIB = 2**30
_CPU_CACHE_GIB = 1.0
#: The smallest block of vLLM's attention on CPUs: prompts share whole blocks, so small ones share
#: more.
_CPU_BLOCK_TOKENS = 32
_CPU_STEP_TOKENS = 4096


def start_engine(
    config: VllmGeneratorConfig,
    context: WorkerContext,
    files: ModelFiles,
    adapter: Adapter | None,
    image_config: Any | None = None,
) -> Any:
    """Starts vLLM's engine and draws a first sample with it.

    Raises PluginBroken when vLLM cannot be imported, ConfigError for a wrong argument under
    ``engine:``, DataError when the weights are not the model's, when vLLM does not start with it or
    does not take the adapter.

    image_config: transformers' config of a model that takes images; None for other models.
    """
    processes = max(1, len(context.devices))
    threads = threads_of(config.threads, context, files.directory, processes=processes)
    set_environment(context, threads)
    try:
        import torch
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        if cpu and context.engine.get("enforce_eager", True):
            # Otherwise vLLM compiles a function with the C++ compiler at the first sample, to
            # compute ranks of tokens that nobody reads.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        from vllm import EngineArgs, LLMEngine, envs
    # RuntimeError: torchvision for CUDA beside torch for CPUs.
    except (ImportError, RuntimeError) as error:
        raise not_installed(error) from error
    # vLLM fills in what the files lack, and leaves out what it has no place for, without a word.
    check_for_engine(files.directory, trust_remote_code=config.trust_remote_code)
    # vLLM caches its environment; an engine that this process had before would leave its own.
    envs.disable_envs_cache()
    register_models()
    check_engine(
        context.engine, {field.name for field in dataclasses.fields(EngineArgs)}, context.role
    )
    torch.set_num_threads(threads)
    arguments = _arguments(config, context, files, cpu=cpu) | _lora_arguments(adapter)
    if image_config is not None:
        # vLLM's own processor, which says how large images may be, asks for a tokenizer. On CPUs
        # there is no processor.
        arguments |= {"skip_tokenizer_init": False, "skip_mm_profiling": cpu}
        arguments |= {"mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"video": 0}}
    arguments |= context.engine
    try:
        with own_temporary_directory():
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        _sample_once(engine, _first(image_config))
    except Exception as error:  # isolation point: vLLM raises what its parts raise
        raise DataError(
            "vLLM does not start with this model.",
            where=str(files.directory),
            why=first_lines(error),
            todo=_todo(str(error), context),
        ) from error
    if adapter is not None:
        try:
            _sample_once(engine, _first(image_config), adapter.request())
        except Exception as error:  # isolation point, as above
            where = str(adapter.directory)
            raise DataError(
                "vLLM does not take this adapter.", where=where, why=first_lines(error)
            ) from error
    return engine


def set_environment(context: WorkerContext, threads: int) -> None:
    """Sets the environment variables that vLLM reads when it is imported.

    threads: CPU threads of each of its processes.
    """
    # In this process: arrays reach the worker as they are, and one process group holds all there is
    # to end.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # The second model runner has another sampler, which is untested here.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # vLLM takes the first CUDA devices that it sees, so it is shown its own alone. An index of this
    # worker counts within the devices that are visible already, where some are hidden.
    if context.devices:
        visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        visible_devices = [
            visible[index] if index < len(visible) else str(index) for index in context.devices
        ]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices)
    if len(context.devices) > 1:  # each device gets a process, a child of this one
        # Threads run in this process, so it must not fork.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        # Otherwise vLLM wants a NUMA node for each process.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "VLLM_RPC_BASE_PATH" not in os.environ:  # its sockets, which it leaves behind
            os.environ["VLLM_RPC_BASE_PATH"] = _directory_until_exit()


@contextlib.contextmanager
def own_temporary_directory() -> Iterator[None]:
    """Has this process make its temporary files, in the block, in a directory of its own.

    The directory is removed when the process ends. vLLM's processes meet at a temporary file, which
    they leave behind.
    """
    former = tempfile.tempdir
    tempfile.tempdir = _directory_until_exit()
    try:
        yield
    finally:
        tempfile.tempdir = former


def _directory_until_exit() -> str:
    """Makes a directory that only this user may open, and that is removed at this process's end."""
    directory = tempfile.mkdtemp(prefix="vllm-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _first(image_config: Any | None) -> dict[str, Any]:
    """Returns a prompt of one token, with a blank image where the model takes images."""
    if image_config is None:
        return {"type": "token", "prompt_token_ids": [0]}
    from gcore_language.image_text import blank

    ids = np.array([0, image_config.image_token_id], np.int32)
    return Showing(image_config).input(ids, blank(image_config.vision_config))


def _sample_once(engine: Any, prompt: dict[str, Any], lora: Any = None) -> None:
    """Samples one token, so that a missing kernel shows here and not in the middle of a run."""
    from vllm import SamplingParams

    engine.add_request("first", prompt, SamplingParams(max_tokens=1, logprobs=0), lora_request=lora)
    while engine.has_unfinished_requests():
        engine.step()


def _arguments(
    config: VllmGeneratorConfig, context: WorkerContext, files: ModelFiles, *, cpu: bool
) -> dict[str, Any]:
    """Returns what vLLM's EngineArgs get by this plugin's settings. Raises ConfigError."""
    room = config.kv_cache_gib or (_CPU_CACHE_GIB if cpu else None)
    model_limit = position_limit(files.config)
    length = config.context_length and min(
        config.context_length, model_limit or config.context_length
    )
    arguments: dict[str, Any] = {
        "model": str(files.directory),
        "load_format": "safetensors",
        "skip_tokenizer_init": not (config.stop or context.acts),  # stop strings are found by vLLM
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
        "seed": context.seed % 2**32,
        "max_model_len": length,
        "tensor_parallel_size": max(1, len(context.devices)),
        "max_num_seqs": config.max_batch,
        "kv_cache_memory_bytes": None if room is None else int(room * _GIB),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # after the temperature; raw ones are before it
        "worker_extension_cls": "gcore_vllm.worker.WorkerExtension",
        "disable_log_stats": True,
    }
    if cpu:
        # A prompt read in pieces makes vLLM wind back the sample's random generator, which fails on
        # a CPU.
        batched = max(_CPU_STEP_TOKENS, length or model_limit or 0)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": batched}
        arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK_TOKENS}
        if context.engine.get("enable_chunked_prefill"):
            raise ConfigError(
                "vLLM cannot read prompts in pieces on a CPU when samples have seeds.",
                where=f"roles.{context.role}.engine.enable_chunked_prefill",
                todo="Leave it out.",
            )
    return arguments


def _lora_arguments(adapter: Adapter | None) -> dict[str, Any]:
    """Returns the arguments of vLLM's EngineArgs for an adapter; none without one."""
    return (
        {}
        if adapter is None
        else {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter.max_rank}
    )


def _todo(message: str, context: WorkerContext) -> str:
    """Returns what a user can do about an error that vLLM raised at its start."""
    if "head_dim" in message:
        return (
            "Take a model whose heads have a size vLLM has kernels for (32, 64, 80, 96, 112, "
            "128, ...)."
        )
    if "model_len" in message or "max seq len" in message:
        return f"Set roles.{context.role}.config.context_length or kv_cache_gib."
    if context.engine:
        return (
            f"If the model is right, look at roles.{context.role}.engine. The worker's log "
            "has the whole story."
        )
    return "The worker's log has the whole story."


def not_installed(error: Exception) -> PluginBroken:
    """Returns the error for a vLLM that cannot be imported."""
    return PluginBroken(
        "vLLM cannot be imported here.",
        where="vllm",
        why=first_lines(error),
        todo=(
            "Make a venv that has it: g-core venv create vllm (by hand: see the plugin's README)."
        ),
    )
