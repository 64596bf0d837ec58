"""Names the arguments of SGLang's ServerArgs that a role's ``engine:`` may not set.

The mapping is passed on to ServerArgs as it is, after its names were checked.
"""

from __future__ import annotations

from gcore_language.engine_arguments import EngineArguments

#: Exit code of the child for arguments that SGLang does not have; the file in the private directory
#: lists those it has.
EXIT_REFUSED = 3
KNOWN = "known_arguments.json"

#: argument of SGLang -> where this plugin takes it from instead
_SETTINGS = {
    "context_length": "config.context_length",
    "dtype": "config.dtype",
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
        ("attn_dp_size", "dp_size", "ep_size", "nnodes", "pp_size", "tp_size"),
        "a worker runs SGLang on one device; `slots` gives more workers",
    )
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
