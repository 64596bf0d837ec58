"""Learning rate as a function of the update."""

from __future__ import annotations

import math

from gcore_torch.config import TorchTrainerConfig


def rate_at(config: TorchTrainerConfig, update: int, updates: int) -> float:
    """Rate of update 0 .. ``updates`` - 1: rises over the warm-up, then goes to its final fraction at the last."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    done = min(1.0, (update - config.warmup_updates) / max(1, updates - 1 - config.warmup_updates))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * left)
