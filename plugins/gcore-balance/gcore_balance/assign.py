"""Items into bins of like cost: each function takes costs float64[N] and returns the bin of each,
int64[N].
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

import numpy as np

#: Items are exchanged until no bin is fuller than this many times the mean.
_EVEN = 1.003
#: With how many of the lightest bins the fullest one tries to exchange.
_PARTNERS = 4


def in_turn(costs: np.ndarray, bins: int) -> np.ndarray:
    """The costliest items to bins 0, 1, 2 ..., the next ones to bins 0, 1, 2 ... again."""
    placed = np.empty(len(costs), np.int64)
    placed[_costliest_first(costs)] = np.arange(len(costs)) % bins
    return placed


def to_and_fro(costs: np.ndarray, bins: int) -> np.ndarray:
    """Like ``in_turn``, but each round goes the other way than the one before."""
    turn, place = np.divmod(np.arange(len(costs)), bins)
    placed = np.empty(len(costs), np.int64)
    placed[_costliest_first(costs)] = np.where(turn % 2, bins - 1 - place, place)
    return placed


def longest_first(costs: np.ndarray, bins: int) -> np.ndarray:
    """Costliest first, each to the lightest bin, at a tie to the one with fewest items (LPT).

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17 (1969).
    """
    placed, plain = [0] * len(costs), costs.tolist()
    heap = [(0.0, 0, bin_) for bin_ in range(bins)]
    for item in _costliest_first(costs).tolist():
        load, items, bin_ = heap[0]
        placed[item] = bin_
        heapreplace(heap, (load + plain[item], items + 1, bin_))
    return np.array(placed, np.int64)


def evened_out(costs: np.ndarray, bins: int) -> np.ndarray:
    """``longest_first``, then the fullest bin gives an item to a light one, or swaps two, as long
    as that helps.
    """
    placed = longest_first(costs, bins)
    loads = np.bincount(placed, weights=costs, minlength=bins)
    members = lists(placed, bins)
    for _ in range(4 * bins):
        full = int(loads.argmax())
        if loads[full] <= _EVEN * loads.mean():
            break
        light = np.argsort(loads, kind="stable")[:_PARTNERS].tolist()
        # what the light bins may give back: one of their items, or nothing (-1)
        back = [(bin_, item) for bin_ in light if bin_ != full for item in (-1, *members[bin_])]
        partner, given = np.array([bin_ for bin_, _ in back]), np.array([item for _, item in back])
        moved = costs[members[full]][:, None] - np.where(given >= 0, costs[given], 0.0)
        fuller = np.maximum(loads[full] - moved, loads[partner] + moved)
        best = int(fuller.argmin())
        if not fuller.flat[best] < loads[full] * (1 - 1e-12):
            break
        row, column = divmod(best, len(back))
        bin_, item = back[column]
        members[bin_].append(members[full].pop(row))
        if item >= 0:
            members[bin_].remove(item)
            members[full].append(item)
        for changed in (full, bin_):
            loads[changed] = costs[members[changed]].sum()
            placed[members[changed]] = changed
    return placed


def differencing(costs: np.ndarray, bins: int) -> np.ndarray:
    """Rounds of one item for each bin, merged so that their sums cancel; counts differ by at most
    one.

    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", UCB/CSD-83-113
    (1982), on tuples of equal size as in Michiels et al., "Performance ratios for the differencing
    method" (2003).
    """
    rounds = -(-len(costs) // bins)
    if rounds == 0:
        return np.zeros(0, np.int64)
    padded = np.append(costs, np.zeros(rounds * bins - len(costs)))  # with items that are none
    numbers = count()
    tuples = []
    for items in _costliest_first(padded).reshape(rounds, bins):
        sums = padded[items]
        tuples.append((sums[-1] - sums[0], next(numbers), sums, items[:, None]))
    heapify(tuples)  # the widest first
    while len(tuples) > 1:
        _, _, first, items = heappop(tuples)
        _, _, second, others = heappop(tuples)
        sums, members = first + second[::-1], np.concatenate([items, others[::-1]], 1)
        order = _costliest_first(sums)
        sums = sums[order]
        heappush(tuples, (sums[-1] - sums[0], next(numbers), sums, members[order]))
    placed = np.empty(len(padded), np.int64)
    placed[tuples[0][3]] = np.arange(bins)[:, None]
    return placed[: len(costs)]


def two_level(costs: np.ndarray, controllers: int, ranks: int) -> np.ndarray:
    """Items to controllers, then those of each to its ``ranks`` ranks; bins are numbered controller
    by controller.

    The first level needs the costs of all items and nothing else of them; the second runs at each
    controller alone.
    """
    controller = evened_out(costs, controllers)
    placed = np.empty(len(costs), np.int64)
    for i, mine in enumerate(lists(controller, controllers)):
        placed[mine] = i * ranks + evened_out(costs[mine], ranks)
    return placed


def lists(placed: np.ndarray, bins: int) -> list[list[int]]:
    """The items of each bin, in ascending order."""
    order = np.argsort(placed, kind="stable")
    ends = np.cumsum(np.bincount(placed, minlength=bins)).tolist()
    items = order.tolist()
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _costliest_first(costs: np.ndarray) -> np.ndarray:
    return np.argsort(-costs, kind="stable")
