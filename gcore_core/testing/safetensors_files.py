"""Files of the safetensors format, read and written without the library, which the core does not
require.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.records import TensorSpec

Tensors = list[tuple[TensorSpec, np.ndarray]]  # arrays are flat uint8


def read_safetensors(file: Path) -> Tensors:
    """A file of the safetensors format: eight bytes of length, a JSON header, the tensors."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]), last - first)
        found.append((spec, np.frombuffer(content, np.uint8, last - first, start + first)))
    return found


def write_safetensors(file: Path, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
    header: dict[str, Any] = {}
    content = b""
    for spec, array in tensors:
        place = [len(content), len(content) + array.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": place}
        content += array.tobytes()
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + content)
