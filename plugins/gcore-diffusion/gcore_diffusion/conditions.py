"""What a model is told of a prompt, as one array: stored once for all records of the prompt,
whoever shares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors.numpy import load, save

from gcore_diffusion.way import Condition


def to_array(condition: Mapping[str, np.ndarray]) -> np.ndarray:
    """uint8[*]: the arrays by name, as a safetensors file has them."""
    return np.frombuffer(save(dict(condition)), np.uint8)


def from_array(array: np.ndarray) -> Mapping[str, np.ndarray]:
    """The arrays that ``to_array`` got, read-only."""
    return dict(load(array.tobytes()))


def stacked(conditions: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> Condition:
    """Conditions of one model side by side: [B, ...] each."""
    names = list(conditions[0]) if conditions else []
    return {
        name: torch.from_numpy(np.stack([c[name] for c in conditions])).to(device) for name in names
    }
