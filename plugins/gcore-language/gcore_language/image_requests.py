"""Makes requests ready for an engine when their prompts may show images.

It also says what a record holds of its images.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_language.images import FAMILIES, GRID, PIXELS, ImageReader, Images
from gcore_language.model_files import ModelFiles, told_as
from gcore_language.prompts import PromptEncoder, refuse_images

#: How names of tensors begin: in checkpoints of ``FAMILIES`` -> in transformers' modules. Trainers
#: push tensors by the names of the modules.
_IN_MODULES = (
    (re.compile(r"^visual\."), "model.visual."),
    (re.compile(r"^model\.(?!language_model\.|visual\.)"), "model.language_model."),
)
_IN_CHECKPOINTS = {"model.visual.": "visual.", "model.language_model.": "model."}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A request that fits into the context.

    request: the request itself.
    prompt: int32[P], its tokens, with all tokens of its images.
    room: how many tokens the context has left.
    images: the prompt's images, the same object for all its samples; None without any.
    """

    request: SampleRequest
    prompt: np.ndarray
    room: int
    images: Images | None


def load_image_config(files: ModelFiles, *, trust_remote_code: bool = False) -> Any | None:
    """Loads the config of a model of ``FAMILIES``; returns None for any other model.

    Raises DataError when transformers cannot read it.
    """
    plain_config = json.loads((files.directory / "config.json").read_text(encoding="utf-8"))
    if plain_config.get("model_type") not in FAMILIES:
        return None
    from transformers import AutoConfig

    with told_as("config", files.directory):
        return AutoConfig.from_pretrained(files.directory, trust_remote_code=trust_remote_code)


def name_in_modules(name: str) -> str:
    """Turns a tensor's name in checkpoints of ``FAMILIES`` into its name in a push."""
    for beginning, other in _IN_MODULES:
        name = beginning.sub(other, name)
    return name


def name_in_checkpoint(name: str) -> str:
    """Turns a tensor's name in a push into its name in checkpoints of ``FAMILIES``."""
    for beginning, other in _IN_CHECKPOINTS.items():
        if name.startswith(beginning):
            return other + name.removeprefix(beginning)
    return name


def make_ready(
    encoder: PromptEncoder,
    requests: Sequence[SampleRequest],
    context_length: int,
    version: int,
    reader: ImageReader | None,
) -> tuple[list[Ready], list[Finished]]:
    """Returns (requests that can be served, records of requests that fail).

    A prompt is encoded, and its images are opened, once for all its samples.

    context_length: the most tokens of prompt and completion.
    version: the version of the weights, for the records that fail.
    reader: opens images; None for a model of text.

    Raises DataError for an image that cannot be shown.
    """
    images = {} if reader is None else reader.read(requests)

    def lay(request: SampleRequest, ids: np.ndarray) -> np.ndarray:
        if reader is None:
            return refuse_images(request, ids)
        return reader.lay(request.prompt, ids, images.get(request.ordinal))

    fitting, failed = encoder.fitting(requests, context_length, version, lay)
    ready = [
        Ready(request=request, prompt=prompt, room=room, images=images.get(request.ordinal))
        for request, prompt, room in fitting
    ]
    return ready, failed


def image_columns(images: Images | None) -> dict[str, np.ndarray]:
    """Returns what a record holds of its images among the columns."""
    return {} if images is None else {GRID: images.grid}


def image_media(images: Images | None) -> dict[str, np.ndarray]:
    """Returns what a record holds of its images among the media.

    It is the same array for all samples of a prompt.
    """
    return {} if images is None else {PIXELS: images.pixels}
