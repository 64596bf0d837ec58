"""Names the arguments of vLLM's EngineArgs that a role's ``engine:`` may not set.

The mapping is passed on to EngineArgs as it is, after its names were checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gcore_language.engine_arguments import EngineArguments, sentence

#: argument of vLLM -> where this plugin takes it from instead
_SETTINGS = {
    "dtype": "config.dtype",
    "enable_lora": "config.lora_path",
    "kv_cache_memory_bytes": "config.kv_cache_gib",
    "max_lora_rank": "config.lora_path",
    "max_model_len": "config.context_length",
    "max_num_seqs": "config.max_batch",
    "model": "model.path",
    "seed": "run.seed",
    "tokenizer": "model.path",
    "trust_remote_code": "config.trust_remote_code",
}
#: argument of vLLM -> why it cannot be chosen
_FIXED = {
    "load_format": "weights are read from safetensors, which cannot run code",
    "logprobs_mode": "records need log-probs at the sampling temperature",
    "skip_tokenizer_init": "this plugin encodes and decodes by itself",
    "worker_extension_cls": "it takes the weight pushes",
    "data_parallel_size": "`slots` gives more workers",
    "pipeline_parallel_size": "a model is split over devices by its tensors",
    "tensor_parallel_size": (
        "a model is split over the devices that the placement gives to one worker"
    ),
}


_ARGUMENTS = EngineArguments(
    settings=_SETTINGS,
    fixed=_FIXED,
    unknown="vLLM has no engine argument",
    listed="They are the fields of vllm.EngineArgs.",
)


def check_engine(engine: Mapping[str, Any], known: Collection[str], role: str) -> None:
    """Raises ConfigError for a name in ``engine:`` that vLLM lacks, or that cannot be set there.

    engine: the role's ``engine:`` mapping.
    known: the names that vLLM has.
    role: the role's name, for the error.
    """
    _ARGUMENTS.check_set_here(engine, role)
    _ARGUMENTS.check_known(engine, known, role)


def problems(engine: Mapping[str, Any], role: str) -> Iterator[str]:
    """Yields one sentence for every name under ``engine:`` that is set elsewhere or fixed.

    Names that vLLM lacks are not among them: it knows them alone, and refuses them at its start.
    """
    return map(sentence, _ARGUMENTS.refusals_here(engine, role))
