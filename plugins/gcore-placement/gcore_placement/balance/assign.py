"""Ways to put items into bins so that the bins cost about the same.

Each function takes costs float64[N], at least 0, and the number of bins, and returns the bin of
each item, int64[N]. Ties are broken by the lower index, so results repeat.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

import numpy as np

#: ``evened_out`` stops when the fullest bin costs at most this many times the mean.
_EVEN = 1.003
#: The fullest bin tries exchanges with this many of the lightest bins.
_PARTNERS = 4


def in_turn(costs: np.ndarray, bins: int) -> np.ndarray:
    """Deals items in descending order of cost to bins 0, 1, 2 ... 0, 1, 2 ..."""
    bin_of = np.empty(len(costs), np.int64)
    bin_of[_costliest_first(costs)] = np.arange(len(costs)) % bins
    return bin_of


def to_and_fro(costs: np.ndarray, bins: int) -> np.ndarray:
    """Like ``in_turn``, but every second round goes backwards: bins 0, 1, 2, 2, 1, 0, 0 ..."""
    round_, place = np.divmod(np.arange(len(costs)), bins)
    bin_of = np.empty(len(costs), np.int64)
    bin_of[_costliest_first(costs)] = np.where(round_ % 2, bins - 1 - place, place)
    return bin_of


def longest_first(costs: np.ndarray, bins: int) -> np.ndarray:
    """Longest processing time first (LPT): the costliest item goes to the lightest bin, and so on.

    Of bins that cost the same, the one with the fewest items gets it.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17 (1969).
    """
    bin_of = [0] * len(costs)
    cost_of = costs.tolist()
    heap = [(0.0, 0, bin_) for bin_ in range(bins)]
    for item in _costliest_first(costs).tolist():
        load, items, bin_ = heap[0]
        bin_of[item] = bin_
        heapreplace(heap, (load + cost_of[item], items + 1, bin_))
    return np.array(bin_of, np.int64)


def evened_out(costs: np.ndarray, bins: int) -> np.ndarray:
    """Improves ``longest_first`` by local search.

    In each round the fullest bin gives one of its items to one of the lightest bins, or swaps two
    items with it: whichever makes the fuller of the two bins cheapest. It ends when that no longer
    helps, when the bins are even enough, or after 4 rounds for each bin.
    """
    bin_of = longest_first(costs, bins)
    loads = np.bincount(bin_of, weights=costs, minlength=bins)
    members = lists(bin_of, bins)
    for _ in range(4 * bins):
        full = int(loads.argmax())
        if loads[full] <= _EVEN * loads.mean():
            break
        light = np.argsort(loads, kind="stable")[:_PARTNERS].tolist()
        # returns: what a light bin may give in return, one of its items or nothing (-1).
        # moved[i, j]: cost that leaves the full bin if its item i is exchanged for returns[j].
        # fuller[i, j]: what the fuller of the two bins costs after that.
        returns = [(bin_, item) for bin_ in light if bin_ != full for item in (-1, *members[bin_])]
        partner = np.array([bin_ for bin_, _ in returns])
        returned = np.array([item for _, item in returns])
        moved = costs[members[full]][:, None] - np.where(returned >= 0, costs[returned], 0.0)
        fuller = np.maximum(loads[full] - moved, loads[partner] + moved)
        best = int(fuller.argmin())
        if not fuller.flat[best] < loads[full] * (1 - 1e-12):
            break
        row, column = divmod(best, len(returns))
        bin_, item = returns[column]
        members[bin_].append(members[full].pop(row))
        if item >= 0:
            members[bin_].remove(item)
            members[full].append(item)
        for changed in (full, bin_):
            loads[changed] = costs[members[changed]].sum()
            bin_of[members[changed]] = changed
    return bin_of


def differencing(costs: np.ndarray, bins: int) -> np.ndarray:
    """Balanced differencing: bins get numbers of items that differ by at most one.

    Items in descending order of cost are cut into tuples, one item for each bin. Then the two
    tuples whose sums are spread the most are merged, the largest sums of one with the smallest of
    the other so that differences cancel, until a single tuple is left: its entries are the bins.

    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", UCB/CSD-83-113
    (1982), on tuples of equal size as in Michiels et al., "Performance ratios for the differencing
    method" (2003).
    """
    rounds = -(-len(costs) // bins)
    if rounds == 0:
        return np.zeros(0, np.int64)
    padded = np.append(costs, np.zeros(rounds * bins - len(costs)))  # with items of cost 0
    numbers = count()  # breaks ties in the heap, so that arrays are never compared
    tuples = []
    for items in _costliest_first(padded).reshape(rounds, bins):
        sums = padded[items]
        tuples.append((sums[-1] - sums[0], next(numbers), sums, items[:, None]))
    heapify(tuples)  # least minus greatest sum is negative: the widest spread comes first
    while len(tuples) > 1:
        _, _, first, items = heappop(tuples)
        _, _, second, others = heappop(tuples)
        sums = first + second[::-1]
        members = np.concatenate([items, others[::-1]], 1)
        order = _costliest_first(sums)
        sums = sums[order]
        heappush(tuples, (sums[-1] - sums[0], next(numbers), sums, members[order]))
    bin_of = np.empty(len(padded), np.int64)
    bin_of[tuples[0][3]] = np.arange(bins)[:, None]
    return bin_of[: len(costs)]


def lists(bin_of: np.ndarray, bins: int) -> list[list[int]]:
    """Returns the items of each bin, in ascending order."""
    order = np.argsort(bin_of, kind="stable")
    ends = np.cumsum(np.bincount(bin_of, minlength=bins)).tolist()
    items = order.tolist()
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _costliest_first(costs: np.ndarray) -> np.ndarray:
    """Returns items in descending order of cost, those of one cost in ascending order."""
    return np.argsort(-costs, kind="stable")
