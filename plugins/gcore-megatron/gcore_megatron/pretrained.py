"""Writes weights to safetensors in Hugging Face layout, each file when its tensors are there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gcore_core.contract.records import TensorSpec
from gcore_megatron.convert import Piece

#: The most bytes of one file. The writer holds a whole file in memory.
FILE_BYTES = 2**31


def write_pretrained(
    directory: Path,
    specs: Sequence[TensorSpec],
    gathered: Iterable[tuple[Piece, Tensor | None]],
    *,
    writes: bool,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes the gathered weights, and an index when there are several files.

    Every rank calls it, because all of them take part in gathering a tensor. So one that cannot
    write goes on to the last tensor and raises OSError or SafetensorError then.

    writes: whether this rank is the one that gets the whole tensors.
    file_bytes: the most bytes of one file; a larger tensor gets a file of its own.
    """
    # share the tensors out to files, in the order in which they will come
    files: list[list[str]] = [[]]
    held_bytes = 0
    for spec in specs:
        if files[-1] and held_bytes + spec.nbytes > file_bytes:
            files.append([])
            held_bytes = 0
        files[-1].append(spec.name)
        held_bytes += spec.nbytes
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = ["model.safetensors"]
    file_of = {
        tensor: name for tensors, name in zip(files, names, strict=True) for tensor in tensors
    }
    last_of = {name: tensors[-1] for tensors, name in zip(files, names, strict=True)}
    error: Exception | None = None
    pending: dict[str, Tensor] = {}
    for piece, whole in gathered:
        if not writes or whole is None or error is not None:
            continue
        pending[piece.name] = whole.cpu()
        name = file_of[piece.name]
        if piece.name == last_of[name]:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                save_file(pending, directory / name, {"format": "pt"})
            except (OSError, SafetensorError) as refused:
                error = refused
            pending = {}
    if error is not None:
        raise error
    if writes and len(files) > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
            "weight_map": file_of,
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
