"""Micro-batches of ranks that wait for each other in every one of them.

Ranks with sharded weights do: each has one micro-batch at a time, and the slowest decides how long
that takes. So all ranks need as many, and those of one place should cost the same.

A rank knows only its own rows, which are sorted from wide to narrow, and cuts them into runs of
neighbours, since rows of like width need little padding. It has two ways to cut them:

    full    as many rows into each micro-batch as the budget allows: the last one is what is left
    even    no micro-batch costs more than it must, given how many the fullest rank has

Either way the costliest comes first, so that costly ones meet costly ones. Which way waits less
depends on all ranks, so they tell each other the costs at each place and all choose the same.

Rejected: the costliest row to the cheapest micro-batch that has room. It mixes widths: evener, and
with the padding a third dearer than full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

#: Halvings of the range in which the least bound on a micro-batch's cost lies.
_HALVINGS = 30


class Maxima(Protocol):
    """Takes the maximum over all ranks, element by element; see ``Ranks``."""

    def max(self, values: list[float]) -> list[float]: ...


def sizes_in_lockstep(
    minibatches: Sequence[np.ndarray], budget_tokens: int, hidden_size: int, ranks: Maxima
) -> list[list[list[int]]]:
    """Returns the micro-batches of each minibatch, costliest first; each lists numbers of rows.

    All ranks must call it together. They need not have equally many minibatches.

    minibatches: int64[rows] for each, the widths of this rank's rows, from wide to narrow.
    budget_tokens: a micro-batch has at most so many tokens, padding included, or a single row.
    hidden_size: of the model, for what a token costs beside a pair of tokens.
    """
    count = int(ranks.max([len(minibatches)])[0])
    widths = [*minibatches, *[np.zeros(0, np.int64)] * (count - len(minibatches))]
    costs = [_row_costs(part, hidden_size) for part in widths]
    full = [_cut(*both, budget_tokens, np.inf) for both in zip(widths, costs, strict=True)]
    places = [int(most) for most in ranks.max([len(cuts) for cuts in full])]
    even = [
        _even(part, row_costs, budget_tokens, most)
        for part, row_costs, most in zip(widths, costs, places, strict=True)
    ]
    ways = [
        [_costliest_first(cuts, row_costs) for cuts, row_costs in zip(way, costs, strict=True)]
        for way in (full, even)
    ]
    waits = [_waits(way, costs, places, ranks) for way in ways]
    chosen = [
        full_cuts if full_wait <= even_wait else even_cuts
        for full_cuts, even_cuts, full_wait, even_wait in zip(*ways, *waits, strict=True)
    ]
    return [[list(cut) for cut in cuts] for cuts in chosen[: len(minibatches)]]


def _row_costs(widths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Returns float64[rows]: what a row of each width costs, in tokens' worth without attention.

    With D the hidden size, a token costs 12 D and each of the width^2 pairs of a causal attention
    1, as ``packing.cheapest_layout`` counts them.
    """
    tokens = widths.astype(np.float64)
    return np.asarray(tokens + tokens**2 / (12 * hidden_size))


def _cost(cut: range, row_costs: np.ndarray) -> float:
    """Returns what a micro-batch costs whose rows are all padded to the first, the widest."""
    return float(len(cut) * row_costs[cut.start])


def _cut(
    widths: np.ndarray, row_costs: np.ndarray, budget_tokens: int, most_cost: float
) -> list[range]:
    """Returns runs of rows, each within the budget and the cost, or a single row."""
    cuts: list[range] = []
    for row in range(len(widths)):
        if cuts:
            longer = range(cuts[-1].start, row + 1)
            tokens = len(longer) * widths[longer.start]
            if tokens <= budget_tokens and _cost(longer, row_costs) <= most_cost:
                cuts[-1] = longer
                continue
        cuts.append(range(row, row + 1))
    return cuts


def _even(
    widths: np.ndarray, row_costs: np.ndarray, budget_tokens: int, places: int
) -> list[range]:
    """Returns at most ``places`` runs of rows, the costliest as cheap as it can be."""
    best = _cut(widths, row_costs, budget_tokens, np.inf)
    if not best:
        return best
    low = float(row_costs[0])
    high = max(_cost(cut, row_costs) for cut in best)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        cuts = _cut(widths, row_costs, budget_tokens, middle)
        if len(cuts) <= places:
            best = cuts
            high = middle
        else:
            low = middle
    return best


def _costliest_first(cuts: list[range], row_costs: np.ndarray) -> list[range]:
    return sorted(cuts, key=lambda cut: (-_cost(cut, row_costs), cut.start))


def _waits(
    way: list[list[range]], costs: list[np.ndarray], places: list[int], ranks: Maxima
) -> list[float]:
    """Returns what each minibatch costs all ranks: the sum over places of the costliest rank's."""
    table = np.zeros((len(places), max(places, default=0)))
    for row, cuts, row_costs in zip(table, way, costs, strict=True):
        row[: len(cuts)] = [_cost(cut, row_costs) for cut in cuts]
    if not table.size:
        return [0.0] * len(places)
    most = np.array(ranks.max(table.flatten().tolist()))
    return [float(total) for total in most.reshape(table.shape).sum(1)]
