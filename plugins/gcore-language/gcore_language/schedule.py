"""Computes the learning rate of an update."""

from __future__ import annotations

import math

from gcore_language.settings import TrainerSettings


def rate_at(settings: TrainerSettings, update: int, updates: int) -> float:
    """Returns the learning rate of one update.

    It rises linearly over the warm-up, stays or falls after it, and ends at its final fraction.

    update: number of the update, from 0 on.
    updates: number of updates in the run.
    """
    if update < settings.warmup_updates:
        return settings.learning_rate * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min(
        1.0, (update - settings.warmup_updates) / max(1, updates - 1 - settings.warmup_updates)
    )
    height = (
        1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    )
    return settings.learning_rate * (
        settings.final_fraction + (1 - settings.final_fraction) * height
    )
