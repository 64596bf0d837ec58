"""A trainer's state as safetensors and one JSON file; any number of ranks, any trainer can load it.

A file holds tensors named ``<part>/<Hugging Face name>``; parts: weight, and AdamW's exp_avg and exp_avg_sq. All are
float32 in Hugging Face layout. A tensor is whole in one file, or its rows are in several: those of the first file,
then those of the next, in the order of their names (``state-<rank>-...``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gcore_core.errors import DataError

#: Most bytes of whole tensors that are held before they are written to a file.
_FILE_BYTES = 2**31
#: AdamW's state of one parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(
    directory: Path, parts: Iterable[tuple[str, Tensor]], numbers: Mapping[str, Any], *, writes: bool
) -> None:
    """Writes ("part/name", whole tensor) pairs and ``numbers``. Every rank calls it, since making a tensor whole may
    need all of them; one writes."""
    directory.mkdir(parents=True, exist_ok=True)
    held: dict[str, Tensor] = {}
    files = 0
    for key, whole in parts:
        if not writes:
            continue
        held[key] = whole.detach().cpu().contiguous().clone()
        if sum(tensor.nbytes for tensor in held.values()) >= _FILE_BYTES:
            save_file(held, directory / f"state-{files:05d}.safetensors")
            held, files = {}, files + 1
    if writes:
        if held:
            save_file(held, directory / f"state-{files:05d}.safetensors")
        (directory / "state.json").write_text(json.dumps(dict(numbers)))


def load_numbers(directory: Path) -> dict[str, Any]:
    """The numbers of a saved state. Raises DataError."""
    manifest = directory / "state.json"
    try:
        numbers: dict[str, Any] = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise DataError("trainer state cannot be read.", where=str(manifest), why=str(error)) from error
    return numbers


def load_parts(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str, Tensor]]:
    """(part, name, whole tensor), one at a time; raises DataError unless these are the tensors of ``shapes``."""
    missing = set(shapes)
    for key, whole in _stored(directory):
        part, _, name = key.partition("/")
        if tuple(whole.shape) != shapes.get(name):
            found = f"shape {shapes[name]}" if name in shapes else "no such tensor"
            raise DataError(
                f"trainer state is of another model: {name} has shape {tuple(whole.shape)}, the model {found}.",
                where=str(directory),
            )
        if part == "weight":
            missing.discard(name)
        yield part, name, whole
    if missing:
        raise DataError(
            f"trainer state lacks weight/{min(missing)}.", where=str(directory), why=f"{len(missing)} in all"
        )


def _stored(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by key, in the order of the first file."""
    holders: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        for path in sorted(directory.glob("state-*.safetensors")):
            try:
                file = stack.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                raise DataError("trainer state cannot be read.", where=str(path), why=str(error)) from error
            for key in file.keys():  # noqa: SIM118 (not a dict)
                holders.setdefault(key, []).append(file)
        for key, files in holders.items():
            rows = [file.get_tensor(key) for file in files]
            yield key, rows[0] if len(rows) == 1 else torch.cat(rows)
