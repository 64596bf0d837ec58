"""Writes buckets of a weight push as files that SGLang reads.

Each bucket is one safetensors file in a directory of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gcore_core.contract.errors import WorkerError
from gcore_core.contract.records import TensorSpec


@contextmanager
def bucket_directory(
    parent: Path, tensors: Sequence[tuple[TensorSpec, np.ndarray]]
) -> Iterator[Path]:
    """Yields a directory that holds the tensors, and removes it afterwards.

    Raises WorkerError when it cannot be written.

    tensors: each with its bytes as a flat uint8 array.
    """
    directory = parent / "bucket"
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        _write(directory / "model.safetensors", tensors)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        nbytes = sum(spec.nbytes for spec, _ in tensors)
        raise WorkerError(
            f"a bucket of {nbytes} bytes cannot be written.",
            where=str(parent),
            why=str(error),
            todo="Give this machine, or its container, more shared memory.",
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write(file: Path, tensors: Sequence[tuple[TensorSpec, np.ndarray]]) -> None:
    """Writes the tensors as one safetensors file."""
    # A safetensors file is the header's length (8 bytes, little endian), the header as JSON, which
    # says where each tensor lies, and the tensors' bytes.
    header = {}
    offset = 0
    for spec, _ in tensors:
        place = [offset, offset + spec.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": place}
        offset += spec.nbytes
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % 8)  # tensors begin at a multiple of eight
    with file.open("wb") as opened:
        opened.write(len(head).to_bytes(8, "little") + head)
        for _, array in tensors:
            opened.write(array.data)
