"""Packs micro-batches for ranks that must meet in every one of them, as with sharded weights.

The slowest rank of each micro-batch decides how long it takes. So all ranks need the same number of
micro-batches, and those that run at the same time should have equal cost.
No padding is counted: rows that are padded to a common width are for ``gcore_language.lockstep``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def micro_batches(
    lengths: np.ndarray, costs: np.ndarray, ranks: Sequence[Sequence[int]], budget_tokens: int
) -> list[list[list[int]]]:
    """Packs the items of each rank into the same number of micro-batches, costliest first.

    Returns the micro-batches of each rank; one is a list of items, perhaps empty.

    lengths: int64[N], tokens of each item.
    costs: float64[N], cost of each item, in any unit.
    ranks: the items of each rank.
    budget_tokens: the most tokens of a micro-batch, unless it holds a single item.
    """
    slots = max(
        (-(-int(lengths[list(items)].sum()) // budget_tokens) for items in ranks), default=0
    )
    while True:
        packed: list[list[list[int]]] = []
        for items in ranks:
            parts = _pack(lengths, costs, items, slots, budget_tokens)
            if parts is None:
                break
            packed.append(parts)
        else:
            return packed
        slots += 1


def _pack(
    lengths: np.ndarray, costs: np.ndarray, items: Sequence[int], slots: int, budget_tokens: int
) -> list[list[int]] | None:
    """Packs one rank's items into ``slots`` micro-batches; None when an item fits into none.

    The costliest item goes first, each to the cheapest slot that has room.
    """
    parts: list[list[int]] = [[] for _ in range(slots)]
    tokens = np.zeros(slots)
    loads = np.zeros(slots)
    for item in sorted(items, key=lambda item: (-costs[item], item)):
        free = (tokens == 0) | (tokens + lengths[item] <= budget_tokens)
        if not free.any():
            return None
        slot = int(np.where(free, loads, np.inf).argmin())
        parts[slot].append(item)
        tokens[slot] += lengths[item]
        loads[slot] += costs[item]
    return [parts[slot] for slot in np.argsort(-loads, kind="stable")]
