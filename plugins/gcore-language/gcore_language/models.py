"""Opens and saves Hugging Face models, and chooses where they run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_language.images import takes_images
from gcore_language.prompts import LOAD_ERRORS, unreadable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def refuse_engine(context: WorkerContext) -> None:
    """Raises ConfigError when the role sets ``engine:``, for a backend that has none."""
    if context.engine:
        raise ConfigError(
            f"this plugin has no engine, so it cannot pass on {', '.join(context.engine)}.",
            where=f"roles.{context.role}.engine",
            todo="This plugin's settings go under config.",
        )


def load_model(
    path: str,
    *,
    dtype: str,
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    images: bool = False,
) -> Any:
    """Opens a causal language model of transformers on the CPU, in evaluation mode.

    images: whether it may be an image-text model.

    Raises DataError when transformers cannot load it.
    """
    _import_without_sklearn()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        seeing = images and takes_images(
            AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        )
        model = (AutoModelForImageTextToText if seeing else AutoModelForCausalLM).from_pretrained(
            path,
            dtype=DTYPES[dtype],
            attn_implementation=None if attn_implementation == "auto" else attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
        )
    except LOAD_ERRORS as error:
        raise unreadable("model", path, error) from error
    # transformers' embedding drops the gradient of this token, but where it was sampled it is an
    # action like any other
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def _import_without_sklearn() -> None:
    """Imports transformers' generation as if scikit-learn were not installed.

    Where it is, transformers imports it for assisted generation, which nothing here does: 30 MiB
    for each process.
    """
    from transformers import utils

    is_installed = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        # imported once, with the answer of this moment
        importlib.import_module("transformers.generation.candidate_generator")
    finally:
        utils.is_sklearn_available = is_installed


def choose_device(name: str, context: WorkerContext, threads: int) -> torch.device:
    """Returns the torch device of this worker, and sets its number of CPU threads.

    name: "auto", "cpu" or "cuda".
    threads: 0 leaves torch's choice.

    Raises ConfigError for cuda where torch sees no CUDA device.
    """
    if threads > 0:
        torch.set_num_threads(threads)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no CUDA device.",
            where=f"roles.{context.role}.config.device",
            todo="Use cpu.",
        )
    device = torch.device("cuda", context.devices[0] if context.devices else 0)
    torch.cuda.set_device(device)
    return device


def save_model(model: Any, directory: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes config and weights in Hugging Face layout.

    weights: Hugging Face name -> whole tensor.
    dtype: what floating point tensors are converted to.
    """
    cast = {
        name: t.to("cpu", dtype if t.is_floating_point() else t.dtype).contiguous()
        for name, t in weights.items()
    }
    model.save_pretrained(directory, state_dict=cast)
