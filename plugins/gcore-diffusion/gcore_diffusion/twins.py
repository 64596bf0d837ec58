"""Makes tiny random twins of pipelines, for jobs that are to be tried where there is no room.

A twin is a pipeline of the original's class, with its kinds of encoders, transformer and decoder.
It draws images of 32 x 32 pixels and has learned nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_diffusion.sizes import UnknownPipeline, class_of

#: Side of a twin's images in pixels, denoising steps, tokens of a prompt, rank of adapters.
_SIDE = 32
_STEPS = 4
_TOKENS = 16
_RANK = 4
#: A directory whose safetensors are smaller is a twin already.
_TINY_BYTES = 2**23


def twin_of_trainer(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Makes a twin of a role's pipeline; returns what replaces the role's settings.

    node: the role as the job writes it: ``model``, ``config``.
    directory: where pipelines go; twins of the same one are one directory.

    Raises ConfigError where the pipeline's class is not known here.
    """
    config = node.get("config") or {}
    smaller: dict[str, Any] = {"max_sequence_length": _TOKENS}
    if (config.get("lora") or {}).get("rank"):
        smaller["lora"] = {"rank": min(_RANK, int(config["lora"]["rank"]))}
    path = (node.get("model") or {}).get("path")
    if path and not _is_tiny(Path(str(path))):
        model = {"path": str(_twin(node["model"], directory)), "revision": None}
        return {"model": model, "config": smaller}
    # the sampler follows a policy, and has no model of its own
    return {"config": smaller} if _is_pipeline(node.get("like") or {}) else {}


def twin_of_generator(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Does what ``twin_of_trainer`` does, and makes images small and steps few."""
    changes = twin_of_trainer(node, directory)
    if not changes:
        return {}
    config = node.get("config") or {}
    steps = min(_STEPS, int(config.get("steps", _STEPS)))
    smaller: dict[str, Any] = {"height": _SIDE, "width": _SIDE, "steps": steps}
    for name, most in {"window": min(2, steps - 1), "window_end": steps - 1}.items():
        if config.get(name) is not None:
            smaller[name] = min(most, int(config[name]))
    changes["config"] |= smaller
    return changes


def twin_of_preference(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Makes a random CLIP in place of a preference model."""
    from gcore_diffusion.tiny_pipelines import save_clip

    path = (node.get("config") or {}).get("path")
    if not path or _is_tiny(Path(str(path))):
        return {}
    place = directory / (str(path).strip("/").replace("/", "--") + "-clip")
    if not (place / "preprocessor_config.json").is_file():
        save_clip(place)
    return {"config": {"path": str(place), "processor": None}}


def _twin(model: Mapping[str, Any], directory: Path) -> Path:
    """Returns the directory of a pipeline's twin, which is made unless it is there."""
    path = str(model["path"])
    try:
        name = class_of(model)
    except UnknownPipeline as error:
        raise ConfigError(
            f"there is no twin of {path}: {error}.",
            where="model.path",
            todo="download its model_index.json, or name a pipeline that is known",
        ) from error
    from gcore_diffusion.tiny_pipelines import CLASSES, save

    if name not in CLASSES:
        raise ConfigError(
            f"there is no twin of {path}: of {name} none can be made.",
            where="model.path",
            todo=f"take one of {', '.join(CLASSES)}",
        )
    place = directory / path.strip("/").replace("/", "--")
    if not (place / "model_index.json").is_file():
        save(CLASSES[name], place)
    return place


def _is_pipeline(model: Mapping[str, Any]) -> bool:
    """Returns whether a policy's model is a pipeline, not the tiny model."""
    try:
        class_of(model)
    except UnknownPipeline:
        return False
    return True


def _is_tiny(path: Path) -> bool:
    """Returns whether a model here is a twin already, or as small as one."""
    files = list(path.rglob("*.safetensors")) if path.is_dir() else []
    return bool(files) and sum(file.stat().st_size for file in files) < _TINY_BYTES
