"""Reads, changes, pushes and hashes the tensors of a weight push, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gcore_core.contract.generator import ReceivesWeights
from gcore_core.contract.records import TensorSpec, WeightPlan
from gcore_core.contract.trainer import Trainer
from gcore_testing.safetensors_files import Tensors, read_safetensors

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
#: bytes of one element
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


def read_model(model: Mapping[str, Any]) -> Tensors:
    """Reads all tensors of a role's model directory; there are none without safetensors files."""
    directory = Path(str(model.get("path", "")))
    files = (
        sorted(directory.glob("*.safetensors")) if model.get("path") and directory.is_dir() else []
    )
    return [item for file in files for item in read_safetensors(file)]


def exported(trainer: Trainer) -> Tensors:
    """Returns a copy of what the trainer exports."""
    return [(spec, np.array(array, copy=True)) for spec, array in trainer.export_weights()]


def perturbed(tensors: Tensors, scale: float = 0.5) -> Tensors:
    """Returns the tensors with floating-point ones multiplied by 1 + scale x noise.

    A little noise is added too, so that zeros change as well. Other tensors stay as they are.
    """
    random = np.random.default_rng(0)
    shaken_tensors = []
    for spec, array in tensors:
        if spec.dtype in _FLOATS:
            values = array.copy().view(_FLOATS[spec.dtype])
            array = _shaken(values, random, scale).astype(values.dtype).view(np.uint8)
        elif spec.dtype == "BF16":
            values = (array.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            shaken = _shaken(values, random, scale).astype(np.float32)
            array = (shaken.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        shaken_tensors.append((spec, array))
    return shaken_tensors


def scaled(tensors: Tensors, factor: float) -> Tensors:
    """Returns the tensors with floating-point ones multiplied by a factor, in their own dtype."""
    scaled_tensors = []
    for spec, array in tensors:
        if spec.dtype in _FLOATS:
            values = array.copy().view(_FLOATS[spec.dtype])
            array = (values * factor).astype(values.dtype).view(np.uint8)
        elif spec.dtype == "BF16":
            values = (array.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            scaled_bits = (values * np.float32(factor)).view(np.uint32) >> 16
            array = scaled_bits.astype(np.uint16).view(np.uint8)
        scaled_tensors.append((spec, array))
    return scaled_tensors


def _shaken(values: np.ndarray, random: np.random.Generator, scale: float) -> np.ndarray:
    noise = random.standard_normal((2, values.size))
    return np.asarray(values * (1 + scale * noise[0]) + 0.02 * noise[1])


def push(receiver: ReceivesWeights, tensors: Tensors, version: int) -> WeightPlan:
    """Makes a whole push in two buckets, as the shell does.

    The arrays are read-only, and their memory is overwritten after the call.
    """
    plan = WeightPlan(version, [spec for spec, _ in tensors])
    receiver.begin_weights(plan)
    half = (len(tensors) + 1) // 2
    for part in (tensors[:half], tensors[half:]):
        load(receiver, part)
    receiver.commit_weights(plan)
    return plan


def load(receiver: ReceivesWeights, tensors: Sequence[tuple[TensorSpec, np.ndarray]]) -> None:
    """Loads one bucket, and overwrites its memory after the call, as happens to a slab's."""
    memory = [array.copy() for _, array in tensors]
    views = [array.view() for array in memory]
    for view in views:
        view.flags.writeable = False
    receiver.load_weights([(spec, view) for (spec, _), view in zip(tensors, views, strict=True)])
    for array in memory:
        array[:] = 0xAA


def digests(tensors: Tensors) -> dict[str, int]:
    """Returns name -> xxh3-64 of the bytes, as in a fingerprint."""
    return {spec.name: xxhash.xxh3_64_intdigest(array.tobytes()) for spec, array in tensors}


def largest_change(before: Tensors, after: Tensors) -> float:
    """Returns the largest change of any element of any floating-point tensor.

    It is infinite when the tensors' descriptions differ, or when the bytes of a tensor differ that
    numpy has no floating-point type for, such as BF16.
    """
    if [spec for spec, _ in before] != [spec for spec, _ in after]:
        return float("inf")
    largest = 0.0
    for (spec, one), (_, other) in zip(before, after, strict=True):
        if spec.dtype in _FLOATS and one.size:
            kind = _FLOATS[spec.dtype]
            difference = one.view(kind).astype(np.float64) - other.view(kind).astype(np.float64)
            largest = max(largest, float(np.abs(difference).max()))
        elif one.tobytes() != other.tobytes():
            return float("inf")
    return largest
