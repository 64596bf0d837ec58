"""Models and tokenizers from a directory in Hugging Face layout, or from the hub by name, and where they run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from gcore_core.errors import ConfigError, DataError
from gcore_core.protocols import WorkerContext

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: What transformers raises for files that are missing, malformed or of an unknown architecture.
_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError)


def model_path(context: WorkerContext) -> str:
    """The ``path`` of a role's model, checked as far as that goes without loading it: a directory with a readable
    ``config.json`` and safetensors, or else a hub name. Raises ConfigError, DataError."""
    if context.engine:
        raise ConfigError(
            f"there is no engine to pass {', '.join(context.engine)} to.",
            where=f"roles.{context.role}.engine",
            todo="This plugin's settings go under config.",
        )
    path = str(context.model.get("path") or "")
    if not path:
        raise ConfigError("no model directory is given.", where=f"roles.{context.role}.model.path")
    directory = Path(path)
    if directory.is_dir():
        _check_directory(directory)
        return path
    named = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
    if not named:
        raise DataError("model directory does not exist.", where=path, todo="Correct model.path.")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise DataError(
            "model is neither a directory nor reachable.",
            where=path,
            why="There is no such directory, and HF_HUB_OFFLINE forbids to ask the hub for that name.",
            todo="Download the model and set model.path to its directory.",
        )
    return path


def _check_directory(directory: Path) -> None:
    config = directory / "config.json"
    if not config.is_file():
        raise DataError("model directory has no config.json.", where=str(directory), todo="Correct model.path.")
    try:
        json.loads(config.read_text())
    except ValueError as error:
        raise DataError("model config is not JSON.", where=str(config), why=str(error)) from error
    if not any(directory.glob("*.safetensors")):
        others = sorted(p.name for p in directory.glob("*.bin"))
        raise DataError(
            "model directory has no weights in safetensors.",
            where=str(directory),
            why=f"It has {', '.join(others)}, which can run code when read." if others else "",
            todo="Convert them: model.save_pretrained(directory) of transformers writes safetensors.",
        )


def load_model(path: str, *, dtype: str, attn_implementation: str = "auto", trust_remote_code: bool = False) -> Any:
    """A transformers causal language model on the CPU in evaluation mode. Raises DataError."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES[dtype],
            attn_implementation=None if attn_implementation == "auto" else attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
        )
    except _LOAD_ERRORS as error:
        raise _unreadable("model", path, error) from error
    return model.eval()


def load_tokenizer(path: str, model: Any, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside the weights. Raises DataError, also when it knows tokens that the model does not embed."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except _LOAD_ERRORS as error:
        raise _unreadable("tokenizer", path, error) from error
    embedded = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedded:
        raise DataError(
            f"tokenizer has {len(tokenizer)} tokens, but the model embeds only {embedded}.",
            where=path,
            todo="Take the tokenizer of this model, or call model.resize_token_embeddings and save it again.",
        )
    return tokenizer


def _unreadable(what: str, path: str, error: Exception) -> DataError:
    first = str(error).strip().splitlines()[:2] or [type(error).__name__]
    return DataError(f"transformers cannot load the {what}.", where=path, why="\n".join(line[:300] for line in first))


def choose_device(name: str, context: WorkerContext, threads: int) -> torch.device:
    """The torch device of this worker; sets its number of CPU threads. Raises ConfigError."""
    if threads > 0:
        torch.set_num_threads(threads)
    if threads == 1:
        # else the tokenizer library's thread pool takes more CPU time for small batches than their work
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device.", where=f"roles.{context.role}.config.device", todo="Use cpu.")
    device = torch.device("cuda", context.devices[0] if context.devices else 0)
    torch.cuda.set_device(device)
    return device


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a completion, by the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return frozenset(found)
