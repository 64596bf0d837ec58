"""Compares what a provider was called with before and after, and asks it often."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

#: How often a provider is asked the same before its answers are called the same.
ASKS = 16


def writable(arguments: T) -> T:
    """Returns a deep copy whose arrays can be written to, as those of a run can."""
    return copy.deepcopy(arguments)


def snapshot(value: Any) -> Any:
    """Returns a value that is equal as long as nothing in the argument changes."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if is_dataclass(value):
        return {field.name: snapshot(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    return copy.deepcopy(value)
