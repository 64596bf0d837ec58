"""Puts tensors where torch itself would put them in memory.

A matrix product may take another path for another alignment of its inputs, and round differently.
torch allocates at multiples of 64 bytes. Arrays of numpy lie at multiples of 16, and weights mapped
from a file wherever the file has them. So a run that is to repeat bit for bit copies both.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_BYTES = 64
_Value = TypeVar("_Value")


def aligned(value: _Value) -> _Value:
    """Returns a tensor, or a dataclass, dict or tuple of them, with all tensors aligned.

    Only tensors that are not aligned are copied. Other values stay as they are.
    """
    return _aligned(value)  # type: ignore[no-any-return]


def _aligned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.data_ptr() % _BYTES else value
    if isinstance(value, dict):
        return {key: _aligned(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_aligned, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(
            value, **{name: _aligned(item) for name, item in fields.items() if item is not None}
        )
    return value


@torch.no_grad()
def align(model: nn.Module) -> None:
    """Moves parameters and buffers of a model to aligned memory. Tied ones stay tied."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = aligned(tensor.data)
