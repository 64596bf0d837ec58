"""Defines what a denoising model must offer, and opens a model directory.

Models differ only in how prompts are encoded, how the model is called, and how a latent becomes a
picture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gcore_language.models import DTYPES
from gcore_language.weights import named_tensors
from torch import Tensor, nn

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_diffusion.config import DenoiserSettings, DiffusionGeneratorConfig, Prediction
from gcore_diffusion.way import Condition, Way


class Denoiser(Protocol):
    """A denoising model, as generator and trainer see it.

    module: the part that is trained.
    device: where it lies.
    prediction: what its output is.
    """

    module: nn.Module
    device: torch.device
    prediction: Prediction

    def dims(self, settings: DiffusionGeneratorConfig) -> tuple[int, ...]:
        """Returns the shape of one latent, as the transitions see it."""

    def encode(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        """Returns the condition of each prompt, without a batch dimension; see ``conditions``.

        Raises DataError for a prompt that it cannot read.
        """

    def sample(
        self, condition: Condition, way: Way, settings: DiffusionGeneratorConfig
    ) -> tuple[Tensor, np.ndarray]:
        """Returns clean latents float32[B, *D] and images uint8[B, H, W, C] of B conditions.

        Every transition goes through ``way.step``.
        """

    def output(self, x: Tensor, times: Tensor, condition: Condition, guidance: float) -> Tensor:
        """Calls the model exactly as ``sample`` does; returns its output, shaped as ``x``.

        x: float32[R, *D].
        times: float32[R], the model's time input.
        condition: [R, ...] each.
        """

    def time_of(self, sigma: Tensor) -> Tensor:
        """Returns a flow model's time input for noise levels sigma, float32[R] each."""

    def save(self, directory: Path) -> None:
        """Writes the model, or its adapters, in its own layout (safetensors)."""

    def close(self) -> None: ...


def open_denoiser(
    settings: DenoiserSettings, context: WorkerContext, device: torch.device, *, sampling: bool
) -> Denoiser:
    """Opens the model of the role's ``model.path``.

    It is the tiny model, or a pipeline for which there is an adapter.

    sampling: whether the whole pipeline is needed, not the denoiser alone.

    Raises ConfigError without a path or without an adapter, DataError when the directory holds no
    model that can be read.
    """
    if not context.model.get("path"):
        raise ConfigError("no model directory is given.", where=f"roles.{context.role}.model.path")
    directory = local_directory(context)
    if (directory / "model_index.json").is_file():
        from gcore_diffusion.pipelines import open_pipeline

        return open_pipeline(directory, settings, device, sampling=sampling)
    from gcore_diffusion.tiny import MODEL_TYPE, TinyDenoiser

    if _model_type(directory) != MODEL_TYPE:
        raise DataError(
            "the directory holds no model that this plugin knows.",
            where=str(directory),
            why=(
                "It has neither a model_index.json nor a config.json whose model_type is "
                f"{MODEL_TYPE}."
            ),
            todo="Give the directory of a diffusers pipeline, or make the tiny model.",
        )
    return TinyDenoiser(directory, device, lora=settings.lora.rank > 0)


def local_directory(context: WorkerContext) -> Path:
    """Returns the directory of the role's model; a pipeline of the hub is downloaded first.

    Raises DataError when there is no such directory and the hub cannot give it.
    """
    path = str(context.model["path"])
    if Path(path).is_dir():
        return Path(path)
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise DataError("model directory does not exist.", where=path, todo="Correct model.path.")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise DataError(
            "the pipeline is neither a directory nor reachable.",
            where=path,
            why="There is no such directory, and HF_HUB_OFFLINE forbids to ask the hub for it.",
            todo="Download it and set model.path to its directory.",
        )
    import diffusers

    try:
        # it takes the files that the pipeline's own index names
        return Path(
            diffusers.DiffusionPipeline.download(
                path, revision=context.model.get("revision"), use_safetensors=True
            )
        )
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise DataError(
            "the pipeline cannot be had from the hub.",
            where=path,
            why=lines[0] if lines else repr(error),
            todo="Accept its licence on its page there, and log in: hf auth login.",
        ) from error


def autocast(settings: DenoiserSettings, device: torch.device) -> AbstractContextManager[Any]:
    """Returns the autocast under which sampler and trainer run the model.

    Both compute with float32 weights, so that a low precision rounds the same in both.
    """
    autocast: AbstractContextManager[Any] = torch.autocast(
        device.type, DTYPES[settings.dtype], enabled=settings.dtype != "float32"
    )
    return autocast


def pushed_tensors(module: nn.Module, settings: DenoiserSettings) -> dict[str, Tensor]:
    """Returns what a trainer trains and pushes: the adapters with LoRA, else everything."""
    tensors = named_tensors(module)
    return (
        {name: t for name, t in tensors.items() if t.requires_grad}
        if settings.lora.rank
        else tensors
    )


def _model_type(directory: Path) -> str:
    try:
        return str(
            json.loads((directory / "config.json").read_text(encoding="utf-8")).get("model_type")
        )
    except (OSError, ValueError, AttributeError):
        return ""
