"""What a model is told of a prompt, as one array: stored once for all records of the prompt,
whoever shares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gcore_core.runtime.store.columns import Chunk, pack
from gcore_diffusion.way import Condition


def to_array(condition: Mapping[str, np.ndarray]) -> np.ndarray:
    """uint8[*]: the arrays by name, as the core packs columns."""
    return np.frombuffer(b"".join(pack([condition])), np.uint8)


def from_array(array: np.ndarray) -> Mapping[str, np.ndarray]:
    return Chunk(memoryview(np.ascontiguousarray(array)))[0]


def stacked(conditions: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> Condition:
    """Conditions of one model side by side: [B, ...] each."""
    names = list(conditions[0]) if conditions else []
    return {
        name: torch.from_numpy(np.stack([c[name] for c in conditions])).to(device) for name in names
    }
