"""Reads and writes safetensors files as tensors of plain bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize, safe_open

from gcore_core.contract.records import TensorSpec

Tensors = list[tuple[TensorSpec, np.ndarray]]  # arrays are flat uint8


def read_safetensors(file: Path) -> Tensors:
    """Returns all tensors of a file, in the order in which they lie in it.

    ``deserialize`` returns them in random order; ``offset_keys`` gives the order of the file.
    """
    entries = dict(deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
    with safe_open(file, framework="numpy") as opened:
        names = opened.offset_keys()
    tensors = []
    for name in names:
        entry = entries[name]
        spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]), len(entry["data"]))
        tensors.append((spec, np.frombuffer(entry["data"], np.uint8)))
    return tensors


def write_safetensors(file: Path, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
    """Writes the format: eight bytes of length, a JSON header, the tensors.

    Not by the library: its writer for numpy has no bfloat16, and the one below that takes
    addresses.
    """
    header: dict[str, Any] = {}
    content = b""
    for spec, array in tensors:
        place = [len(content), len(content) + array.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": place}
        content += array.tobytes()
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + content)
