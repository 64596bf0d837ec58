"""Tells the sizes of pipelines: of those in a directory by their files, of some on the hub by name.

Nothing is loaded and no engine is imported, so that a job can be planned and shrunk where neither
the hub nor its models are reached. The hub's numbers are those of the files as their authors
published them; a pipeline's own files, where they lie here, come first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_language.model_files import shapes_in

from gcore_core.contract.errors import DataError

#: Tensors of a transformer that are computed from its config and not trained.
_COMPUTED = ("pos_embed.pos_embed",)


class UnknownPipeline(ValueError):
    """Says why the sizes of a pipeline cannot be told."""


@dataclass(frozen=True, kw_only=True)
class PipelineSizes:
    """The sizes of a pipeline of diffusers.

    pipeline: its class.
    transformer: numbers of the part that is trained, buffers included.
    fixed: how many of these are buffers, which have no gradient.
    others: numbers of text encoders and image decoder, which only a sampler holds.
    hidden: channels of a token.
    blocks: how many blocks a token goes through.
    side: side of its own images, in pixels.
    pixels: side of the square of pixels that is one token.
    """

    pipeline: str
    transformer: int
    fixed: int
    others: int
    hidden: int
    blocks: int
    side: int
    pixels: int

    @property
    def tokens(self) -> int:
        """Tokens of an image of its own size."""
        return (self.side // self.pixels) ** 2


#: Name on the hub -> its sizes. Others: CLIP-L, CLIP-G (SD3 alone), T5-XXL's encoder, autoencoder.
PUBLISHED: Mapping[str, PipelineSizes] = {
    "stabilityai/stable-diffusion-3.5-medium": PipelineSizes(
        pipeline="StableDiffusion3Pipeline",
        transformer=2_469_663_936,
        fixed=384 * 384 * 1536,
        others=123_650_304 + 694_659_840 + 4_762_310_656 + 83_819_683,
        hidden=1536,
        blocks=24,
        side=1024,
        pixels=16,
    ),
    "black-forest-labs/FLUX.1-dev": PipelineSizes(
        pipeline="FluxPipeline",
        transformer=11_901_408_320,
        fixed=0,
        others=123_060_480 + 4_762_310_656 + 83_819_683,
        hidden=3072,
        blocks=19 + 38,
        side=1024,
        pixels=16,
    ),
}


def read_sizes(model: Mapping[str, Any]) -> PipelineSizes:
    """Returns the sizes of the pipeline that a role's ``model:`` names.

    model: its ``path`` is a directory of diffusers' layout, or a name of ``PUBLISHED``.

    Raises UnknownPipeline.
    """
    if not model.get("path"):
        made = "make" in model
        raise UnknownPipeline("the run makes this model first" if made else "no path is given")
    path = str(model["path"])
    if Path(path).is_dir():
        return _sizes_in(Path(path))
    if path not in PUBLISHED:
        raise UnknownPipeline(f"{path} is neither a directory nor one of {', '.join(PUBLISHED)}")
    return PUBLISHED[path]


def class_of(model: Mapping[str, Any]) -> str:
    """Returns the class of a pipeline, from its ``model_index.json`` or from ``PUBLISHED``.

    Raises UnknownPipeline.
    """
    path = Path(str(model.get("path") or ""))
    if model.get("path") and path.is_dir():
        return str(_read(path / "model_index.json").get("_class_name"))
    return read_sizes(model).pipeline


def _sizes_in(directory: Path) -> PipelineSizes:
    index = _read(directory / "model_index.json")
    config = _read(directory / "transformer" / "config.json")
    try:
        shapes = shapes_in(directory / "transformer")
        others = sum(
            _numbers(shapes_in(part))
            for part in sorted(directory.iterdir())
            if part.name != "transformer" and any(part.glob("*.safetensors"))
        )
    except DataError as error:
        raise UnknownPipeline(f"{error.where}: {error.what}") from error
    return PipelineSizes(
        pipeline=str(index.get("_class_name")),
        transformer=_numbers(shapes),
        fixed=_numbers({name: shapes[name] for name in _COMPUTED if name in shapes}),
        others=others,
        hidden=_number(config, "num_attention_heads") * _number(config, "attention_head_dim"),
        blocks=_number(config, "num_layers") + int(config.get("num_single_layers") or 0),
        side=_PIXELS_OF_A_CELL * int(config.get("sample_size") or _FLUX_CELLS),
        pixels=_PIXELS_OF_A_CELL * _cells_of_a_token(config),
    )


#: Pixels of a latent's cell on a side, in the autoencoders of SD3 and Flux.
_PIXELS_OF_A_CELL = 8
#: Cells on a side of an image of Flux, whose config does not say it.
_FLUX_CELLS = 128


def _cells_of_a_token(config: Mapping[str, Any]) -> int:
    """Returns the cells on a side of a token. Flux packs two by two before the transformer."""
    return 2 if "guidance_embeds" in config else _number(config, "patch_size")


def _numbers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    total = 0
    for shape in shapes.values():
        count = 1
        for side in shape:
            count *= side
        total += count
    return total


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise UnknownPipeline(f"transformer/config.json: {name} is {value!r}, not a number above 0")
    return value


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownPipeline(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnknownPipeline(f"{file} is no mapping")
    return content
