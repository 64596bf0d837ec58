"""Micro-batches of ranks that meet in every one of them, as sharded weights make them do.

The slowest rank of each micro-batch decides, so all ranks need as many, and those of one place
equal cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def micro_batches(
    lengths: np.ndarray, costs: np.ndarray, ranks: Sequence[Sequence[int]], budget_tokens: int
) -> list[list[list[int]]]:
    """Of each rank the same number of micro-batches, costliest first; each is a list of items,
    perhaps empty.

    lengths int64[N], costs float64[N]: of all items; ranks: the items of each. A micro-batch has at
    most ``budget_tokens`` tokens, or a single item.
    """
    slots = max(
        (-(-int(lengths[list(items)].sum()) // budget_tokens) for items in ranks), default=0
    )
    while True:
        found: list[list[list[int]]] = []
        for items in ranks:
            parts = _pack(lengths, costs, items, slots, budget_tokens)
            if parts is None:
                break
            found.append(parts)
        else:
            return found
        slots += 1


def _pack(
    lengths: np.ndarray, costs: np.ndarray, items: Sequence[int], slots: int, budget_tokens: int
) -> list[list[int]] | None:
    """Costliest first, each to the cheapest slot that has room; None when an item finds none."""
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
