"""Packs whole records into rows that a context group shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gcore_language.context.layout import record_costs
from gcore_language.packing import Batch, Sample, in_one_row


def shared_batches(
    samples: Sequence[Sample],
    budget_tokens: int,
    degree: int,
    hidden_size: int,
    device: torch.device,
    *,
    whole_groups: bool,
) -> list[Batch]:
    """Returns batches that together hold every sample once, the costliest first.

    So costly ones of a data-parallel group meet costly ones of another. A batch has at most
    ``budget_tokens`` tokens for each rank, or a single sample that is longer.

    degree: ranks that share a batch.
    hidden_size: of the model, for what a token costs beside a pair of tokens.
    whole_groups: whether all samples of one ordinal go into one batch.
    """
    units = _units(samples, whole_groups)
    units.sort(key=lambda unit: -sum(map(_tokens, unit)))  # stable
    filled: list[list[Sample]] = []
    room: list[int] = []
    for unit in units:
        tokens = sum(map(_tokens, unit))
        place = next((i for i, free in enumerate(room) if free >= tokens), len(room))
        if place == len(room):
            filled.append([])
            room.append(budget_tokens * degree)
        filled[place] += unit
        room[place] -= tokens
    filled.sort(key=lambda part: -_cost(part, hidden_size))
    return [in_one_row(part, device) for part in filled]


def _units(samples: Sequence[Sample], whole_groups: bool) -> list[list[Sample]]:
    if not whole_groups:
        return [[sample] for sample in samples]
    units: dict[int, list[Sample]] = {}
    for sample in samples:
        units.setdefault(sample.ordinal, []).append(sample)
    return list(units.values())


def _tokens(sample: Sample) -> int:
    return len(sample.prompt) + sample.fed


def _cost(samples: Sequence[Sample], hidden_size: int) -> float:
    return float(record_costs(np.array(list(map(_tokens, samples))), hidden_size).sum())
