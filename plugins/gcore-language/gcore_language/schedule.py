"""Learning rate as a function of the update."""

from __future__ import annotations

import math

from gcore_language.settings import TrainerSettings


def rate_at(settings: TrainerSettings, update: int, updates: int) -> float:
    """Rate of update 0 .. ``updates`` - 1: rises over the warm-up, then goes to its final fraction
    at the last.
    """
    if update < settings.warmup_updates:
        return settings.learning_rate * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.learning_rate
    done = min(
        1.0, (update - settings.warmup_updates) / max(1, updates - 1 - settings.warmup_updates)
    )
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * (settings.final_fraction + (1 - settings.final_fraction) * left)
