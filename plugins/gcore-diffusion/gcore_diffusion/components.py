"""Opens the parts of a pipeline of diffusers so that their weights are what the files say.

A text encoder is a model of transformers, and opened as ``gcore_language.pretrained`` opens them.
diffusers' own models are compared in the same way.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gcore_language.model_files import read_config, refuse_quantised, tensors_in, told_as
from gcore_language.pretrained import (
    Differences,
    Opening,
    open_pretrained,
    refuse_not_finite,
    refuse_not_finite_files,
)

from gcore_core.contract.errors import DataError

#: Weights of a part of so many bytes or fewer are read whole before a run.
_READ_BYTES = 1 << 30


def problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Looks at all parts of a pipeline before a run; what is wrong is raised as a DataError.

    arguments: "directory" of the pipeline, or of the tiny model.
    """
    try:
        import diffusers  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError:
        return  # what a role needs is checked by its provider
    directory = Path(arguments["directory"])
    if not (directory / "model_index.json").is_file():
        from gcore_diffusion.tiny import TinyDenoiser

        TinyDenoiser(directory, torch.device("cpu"), lora=False)
        return
    for name, kind in parts_of(directory).items():
        open_part(directory, name, kind, empty=True)
        files = {tensor.file for tensor in tensors_in(directory / name).values()}
        if sum(file.stat().st_size for file in files) <= _READ_BYTES:
            refuse_not_finite_files(directory / name)
    yield from ()


def read_index(directory: Path) -> dict[str, Any]:
    """Reads a pipeline's ``model_index.json``. Raises DataError."""
    file = directory / "model_index.json"
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise ValueError(f"{file.name} is no mapping")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "the pipeline cannot be read.", where=str(directory), why=str(error)
        ) from error
    return index


def parts_of(directory: Path) -> dict[str, type]:
    """Returns the parts of a pipeline that have weights, by name: their classes.

    A class that its library does not have is left to diffusers. Raises DataError for an index that
    cannot be read.
    """
    parts = {}
    for name, named in read_index(directory).items():
        if not isinstance(named, list) or len(named) != 2 or None in named:
            continue  # a setting, or a part that this pipeline leaves out
        library, kind = named
        if library not in ("diffusers", "transformers"):
            continue
        found = getattr(importlib.import_module(library), str(kind), None)
        if isinstance(found, type) and issubclass(found, torch.nn.Module):
            parts[name] = found
    return parts


def open_part(directory: Path, name: str, kind: Any, *, empty: bool = False) -> Any:
    """Opens one part of a pipeline in float32 on the CPU.

    kind: its class.
    empty: whether to read the headers alone: its parameters are then on the meta device.

    Raises DataError as ``open_pretrained`` does.
    """
    place = directory / name
    if kind.__module__.startswith("transformers."):
        return open_pretrained(place, Opening(kind=kind.__name__, what=name), empty=empty)[0]
    tensors = tensors_in(place)
    refuse_quantised(place, read_config(place), tensors)
    with told_as(name, place):
        if empty:
            with torch.device("meta"):
                model = kind.from_config(kind.load_config(str(place)))
            stored = {tensor: one.shape for tensor, one in tensors.items()}
            model._fix_state_dict_keys_on_load(stored)  # old names of attention
            differences = _compared(model, stored)
        else:
            model, info = kind.from_pretrained(
                str(place),
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
            differences = Differences(
                missing=sorted(info["missing_keys"]), unused=sorted(info["unexpected_keys"])
            )
    differences.refuse(place)
    if not empty:
        refuse_not_finite(model.named_parameters(), place)
    return model


def _compared(model: Any, stored: Mapping[str, tuple[int, ...]]) -> Differences:
    """Compares a model of diffusers with the shapes of its files, as diffusers does."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    return Differences(
        missing=sorted(wanted.keys() - stored.keys()),
        unused=sorted(
            name
            for name in stored.keys() - wanted.keys()
            if not any(re.search(pattern, name) for pattern in ignored)
        ),
        reshaped=[
            (name, stored[name], shape)
            for name, shape in sorted(wanted.items())
            if stored.get(name, shape) != shape
        ],
    )
