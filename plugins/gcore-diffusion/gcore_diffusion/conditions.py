"""Packs the condition of a prompt into one array, which all records of the prompt share.

A condition holds the arrays that a model takes for a prompt, by name: text embeddings, a mask, a
class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors.numpy import load, save

from gcore_diffusion.way import Condition


def to_array(condition: Mapping[str, np.ndarray]) -> np.ndarray:
    """Packs named arrays into uint8[*], the bytes of a safetensors file."""
    return np.frombuffer(save(dict(condition)), np.uint8)


def from_array(array: np.ndarray) -> Mapping[str, np.ndarray]:
    """Returns the arrays that ``to_array`` packed."""
    return dict(load(array.tobytes()))


def stacked(conditions: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> Condition:
    """Stacks the conditions of one model: [B, ...] each."""
    names = list(conditions[0]) if conditions else []
    return {
        name: torch.from_numpy(np.stack([c[name] for c in conditions])).to(device) for name in names
    }
