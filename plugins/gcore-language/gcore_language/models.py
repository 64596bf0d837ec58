"""Opens and saves Hugging Face models, and chooses where they run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_language.images import takes_images
from gcore_language.pretrained import (
    CLASSIFIER,
    VALUES,
    language_opening,
    open_pretrained,
    read_hf_config,
)
from gcore_language.settings import threads_of

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
    empty: bool = False,
) -> Any:
    """Opens a causal language model of transformers on the CPU, in evaluation mode.

    images: whether it may be an image-text model.
    empty: whether to leave out the weights: the parameters are on the meta device, and only what
        is computed (rotary tables) has numbers. ``own_rows`` reads the rest.

    Raises DataError as ``open_pretrained`` does.
    """
    directory = Path(path)
    config = read_hf_config(directory, trust_remote_code=trust_remote_code)
    model, _ = open_pretrained(
        directory,
        language_opening(config, images=images),
        config=config,
        dtype=DTYPES[dtype],
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        empty=empty,
    )
    if empty:
        _compute_buffers(model)
    # transformers' embedding drops the gradient of this token, but where it was sampled it is an
    # action like any other
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def load_value_model(
    path: str,
    *,
    std: float = 0.0,
    seed: int = 0,
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    empty: bool = False,
) -> Any:
    """Opens a causal language model with a value head on the CPU, in float32 and evaluation mode.

    It is transformers' sequence classifier with one output: ``score``, a linear map of the last
    hidden state without a bias. A causal model has no such head and gets a new one; its output
    embedding is left out. A reward model of this form keeps its head.

    std: standard deviation of a new head's weights, which are normal; 0 makes them 0.
    seed: of these numbers, which are the same on every rank.
    empty: as in ``load_model``; a new head has its numbers nevertheless.

    Raises DataError when transformers cannot load it, when it takes images, or when it has several
    outputs.
    """
    directory = Path(path)
    config = read_hf_config(directory, trust_remote_code=trust_remote_code)
    check_classifier(config, path)
    config.num_labels = 1
    model, new = open_pretrained(
        directory,
        VALUES,
        config=config,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        empty=empty,
    )
    if not hasattr(model, "score"):
        raise DataError(
            "the model cannot have a value head.",
            where=path,
            why="transformers' sequence classifier of this family has no linear head ``score``",
            todo="take a causal language model such as Llama, Mistral, Qwen or GPT-2",
        )
    if new:
        numbers = new_head(tuple(model.score.weight.shape), std, seed)
        model.score.weight = torch.nn.Parameter(numbers)
    if empty:
        _compute_buffers(model)
    model.get_input_embeddings().padding_idx = None  # see ``load_model``
    return model.eval()


def load_reward_model(path: str, *, dtype: str, trust_remote_code: bool = False) -> Any:
    """Opens a sequence classifier of transformers with one output, in evaluation mode.

    path: its directory.
    dtype: a key of ``DTYPES``.

    Raises DataError when it cannot be read, lacks weights or has several outputs.
    """
    directory = Path(path)
    config = read_hf_config(directory, trust_remote_code=trust_remote_code, what="reward model")
    model, _ = open_pretrained(
        directory,
        CLASSIFIER,
        config=config,
        dtype=DTYPES[dtype],
        trust_remote_code=trust_remote_code,
    )
    check_one_output(config, path)
    return model.eval()


def check_one_output(config: Any, path: str) -> None:
    """Raises DataError for a classifier that has not one output."""
    if config.num_labels != 1:
        raise DataError(
            f"model has {config.num_labels} outputs; a scalar reward model has one.",
            where=path,
            why="It may be a classifier.",
        )


def new_head(shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """Returns the weights of a new value head, float32: normal, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def check_classifier(config: Any, path: str) -> None:
    """Raises DataError for a model that takes images, or that has been trained to name classes."""
    if takes_images(config):
        raise DataError("a model that takes images cannot have a value head.", where=path)
    heads = [name for name in config.architectures or () if name.endswith("Classification")]
    if heads and config.num_labels != 1:
        raise DataError(
            f"the model has {config.num_labels} outputs; a value head has one.",
            where=path,
            why=f"it is a classifier, {heads[0]}",
            todo="take a causal language model, or a reward model with one output",
        )


def _compute_buffers(model: Any) -> None:
    """Gives numbers to the buffers of a model without weights, by transformers' own functions.

    Those are what a model computes when it is made, such as rotary tables; no file has them.
    """
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)  # else its buffers would be left out
        for name in module._non_persistent_buffers_set:
            buffer = getattr(module, name)
            if buffer is not None:
                module.register_buffer(name, torch.empty_like(buffer, device="cpu"), False)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()


def choose_device(
    name: str, context: WorkerContext, threads: int | str, path: str | Path = ""
) -> torch.device:
    """Returns the torch device of this worker, and sets its number of CPU threads.

    name: "auto", "cpu" or "cuda".
    threads: "auto" or a number; see ``threads_of``.
    path: directory of its model; "" for the role's ``model.path``.

    Raises ConfigError for cuda where torch sees no CUDA device.
    """
    torch.set_num_threads(threads_of(threads, context, path or context.model.get("path", "")))
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
    if context.deterministic:
        _repeat_on_gpu()
    device = torch.device("cuda", context.devices[0] if context.devices else 0)
    torch.cuda.set_device(device)
    return device


def _repeat_on_gpu() -> None:
    """Has kernels of this process give the same bits for the same input.

    Sums of which threads add the parts in any order are made another way, or raise RuntimeError.
    """
    # of cuBLAS; it is read when a process first multiplies matrices
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    # these two have gradients that are summed in any order
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def enable_checkpointing(model: Any) -> None:
    """Has a model keep its layers' inputs alone, and compute the rest again in the backward pass.

    That needs training mode, in which dropout would change log-probs, so there is none: neither of
    modules nor of numbers that layers hand to their attention.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    model.gradient_checkpointing_enable()
    model.train()


def save_model(model: Any, directory: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes config and weights in Hugging Face layout.

    How texts are generated is no part of it: ``copy_other_files`` copies that as it came.
    transformers writes no generation_config.json that says, as many do, a temperature and not that
    texts are sampled.

    weights: Hugging Face name -> whole tensor.
    dtype: what floating point tensors are converted to.
    """
    cast = {name: to_host(tensor, dtype) for name, tensor in weights.items()}
    if model.can_generate():
        from transformers import GenerationConfig  # a denoiser is saved without it

        model.generation_config = GenerationConfig()
    model.save_pretrained(directory, state_dict=cast)
    model.config.dtype = dtype  # else the config names the type in which the model was trained
    model.config.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)


def to_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor as it is saved: contiguous, in host memory. One that is so already is
    returned itself.

    dtype: what a floating point tensor is converted to.
    """
    return tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
