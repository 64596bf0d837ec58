"""Names the arguments of SGLang's ServerArgs that a role's ``engine:`` may not set.

The mapping is passed on to ServerArgs as it is, after its names were checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gcore_language.engine_arguments import EngineArguments, sentence

#: Exit code of the child for arguments that SGLang does not have; the file in the private directory
#: lists those it has.
EXIT_REFUSED = 3
KNOWN = "known_arguments.json"
#: Exit code of the child for weights that are not the model's; the file says what is wrong.
EXIT_WRONG_WEIGHTS = 4
WRONG_WEIGHTS = "wrong_weights.json"

#: argument of SGLang -> where this plugin takes it from instead
_SETTINGS = {
    "context_length": "config.context_length",
    "dtype": "config.dtype",
    "enable_lora": "config.lora_rank",
    "max_lora_rank": "config.lora_rank",
    "max_running_requests": "config.max_batch",
    "max_total_tokens": "config.kv_cache_tokens",
    "model_path": "model.path",
    "random_seed": "run.seed",
    "tokenizer_path": "model.path",
    "trust_remote_code": "config.trust_remote_code",
}
#: argument of SGLang -> why it cannot be chosen
_FIXED = (
    {
        "host": "the server listens to its own worker only",
        "incremental_streaming_output": "this plugin reads whole answers",
        "load_format": "weights are read from safetensors, which cannot run code",
        "sampling_defaults": "a record's log-probs are those of the settings under `config`",
        "skip_tokenizer_init": "this plugin encodes and decodes by itself",
        "weight_version": "it counts the weight pushes",
    }
    | dict.fromkeys(("api_key", "admin_api_key"), "the key is drawn anew at each start")
    | dict.fromkeys(
        ("attn_dp_size", "dp_size", "ep_size", "nnodes", "pp_size"),
        "a worker runs one replica on one node; `slots` gives more workers",
    )
    | dict.fromkeys(
        ("lora_paths", "lora_target_modules", "max_loaded_loras", "max_loras_per_batch"),
        "there is one adapter, which pushes bring",
    )
    | {"tp_size": "a model is split over the devices that the placement gives to one worker"}
    | dict.fromkeys(
        ("encoder_only", "grpc_mode", "smg_grpc_mode", "tokenizer_worker_num", "use_ray"),
        "this plugin speaks to SGLang's own HTTP server",
    )
)


ARGUMENTS = EngineArguments(
    settings=_SETTINGS,
    fixed=_FIXED,
    unknown="SGLang has no server argument",
    listed="They are the fields of sglang.srt.server_args.ServerArgs.",
)


def problems(engine: Mapping[str, Any], role: str) -> Iterator[str]:
    """Yields one sentence for every name under ``engine:`` that is set elsewhere or fixed.

    Names that SGLang lacks are not among them: it knows them alone, and refuses them at its start.
    """
    return map(sentence, ARGUMENTS.refusals_here(engine, role))


def lora_arguments(rank: int, names: Iterable[str]) -> dict[str, Any]:
    """Returns the arguments by which SGLang keeps room for an adapter; none for rank 0.

    names: of the model's tensors. Matrices of attention and of the layers behind it may have an
        adapter.
    """
    if not rank:
        return {}
    modules = {name.split(".")[-2] for name in names if name.endswith("_proj.weight")}
    return {
        "enable_lora": True,
        "max_lora_rank": rank,
        "lora_target_modules": sorted(modules),
        # One that was pushed, and samples without any before the first push.
        "max_loras_per_batch": 2,
    }
