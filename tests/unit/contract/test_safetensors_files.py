"""Tensors of a file come back as they were written: names, bytes and order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gcore_testing.safetensors_files import read_safetensors, write_safetensors

from gcore_core.contract.records import TensorSpec


def test_tensors_come_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    names = [f"layer.{i * 7 % 50}" for i in range(50)]
    tensors = [
        (TensorSpec(name, "BF16", (i + 1, 2), 4 * (i + 1)), np.full(4 * (i + 1), i, np.uint8))
        for i, name in enumerate(names)
    ]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = read_safetensors(tmp_path / "model.safetensors")
    assert [spec for spec, _ in found] == [spec for spec, _ in tensors]
    for (_, one), (_, other) in zip(found, tensors, strict=True):
        np.testing.assert_array_equal(one, other)
