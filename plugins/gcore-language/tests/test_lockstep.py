"""Ranks that wait for each other in every micro-batch wait less, and never more."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from gcore_language.lockstep import sizes_in_lockstep
from hypothesis import given, settings
from hypothesis import strategies as st

HIDDEN_SIZE = 5120
Cuts = list[list[list[int]]]


class Meeting:
    """Ranks in threads, which take maxima together."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._values: dict[int, list[float]] = {}

    def max_of(self, rank: int, values: list[float]) -> list[float]:
        self._values[rank] = values
        self._barrier.wait()
        maxima = np.max(list(self._values.values()), axis=0).tolist()
        self._barrier.wait()
        return list(maxima)


class OneOf:
    """One rank's view of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def max(self, values: list[float]) -> list[float]:
        return self._meeting.max_of(self._rank, values)


def pack(widths: Sequence[Sequence[np.ndarray]], budget_tokens: int) -> list[Cuts]:
    """What each rank gets; widths: of each rank, of each of its minibatches."""
    meeting = Meeting(len(widths))
    cuts: dict[int, Cuts] = {}

    def run(rank: int) -> None:
        one = OneOf(meeting, rank)
        cuts[rank] = sizes_in_lockstep(widths[rank], budget_tokens, HIDDEN_SIZE, one)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(widths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [cuts[rank] for rank in range(len(widths))]


def cost(widths: np.ndarray) -> float:
    """Of rows that are padded to the widest."""
    widest = float(widths.max())
    return len(widths) * (widest + widest**2 / (12 * HIDDEN_SIZE))


def full(widths: np.ndarray, budget_tokens: int) -> list[list[int]]:
    """First come, first served: each micro-batch as full as the budget allows."""
    cuts: list[list[int]] = []
    for row in range(len(widths)):
        if cuts and (len(cuts[-1]) + 1) * widths[cuts[-1][0]] <= budget_tokens:
            cuts[-1].append(row)
        else:
            cuts.append([row])
    return cuts


def waited(widths: Sequence[np.ndarray], cuts: Sequence[list[list[int]]]) -> float:
    """The sum over places of what the costliest rank takes there."""
    places = max(map(len, cuts))
    table = np.zeros((len(cuts), places))
    for rank, (rows, own) in enumerate(zip(widths, cuts, strict=True)):
        table[rank, : len(own)] = [cost(rows[cut]) for cut in own]
    return float(table.max(0).sum())


WIDTHS = st.lists(st.integers(1, 300), max_size=20).map(
    lambda widths: np.array(sorted(widths, reverse=True), np.int64)
)


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.lists(WIDTHS, max_size=3), min_size=1, max_size=4),
    budget_tokens=st.integers(1, 900),
)
def test_every_row_is_packed_once_within_the_budget_and_no_rank_has_more_than_the_fullest(
    widths: list[list[np.ndarray]], budget_tokens: int
) -> None:
    packed = pack(widths, budget_tokens)
    minibatches = max(map(len, widths))
    assert [len(rank) for rank in packed] == [len(rank) for rank in widths]
    for number in range(minibatches):
        have = [
            (w[number], p[number]) for w, p in zip(widths, packed, strict=True) if len(w) > number
        ]
        most = max(len(full(rows, budget_tokens)) for rows, _ in have)
        for rows, cuts in have:
            assert len(cuts) <= most
            assert sorted(row for cut in cuts for row in cut) == list(range(len(rows)))
            assert all(len(cut) == 1 or len(cut) * rows[cut].max() <= budget_tokens for cut in cuts)
            costs = [cost(rows[cut]) for cut in cuts]
            assert costs == sorted(costs, reverse=True)
        before = waited([rows for rows, _ in have], [full(rows, budget_tokens) for rows, _ in have])
        after = waited([rows for rows, _ in have], [cuts for _, cuts in have])
        assert after <= before * (1 + 1e-12)


def long_tailed(ranks: int, each: int, seed: int) -> list[np.ndarray]:
    """Widths of each rank's rows, as in a run of up to 16k tokens, dealt to and fro by length."""
    draw = np.random.default_rng(seed)
    lengths = np.minimum(512 + 2500 * np.exp(draw.standard_normal(ranks * each)), 16896)
    dealt = np.sort(lengths.astype(np.int64))[::-1].reshape(each, ranks)
    dealt[1::2] = dealt[1::2, ::-1]
    return [np.sort(dealt[:, rank])[::-1] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("each", "before", "after"),
    [(8, (1.90, 2.12), (1.40, 1.68)), (32, (1.33, 1.50), (1.21, 1.26))],
)
def test_long_tailed_answers_wait_as_much_as_the_page_of_decisions_says(
    each: int, before: tuple[float, float], after: tuple[float, float]
) -> None:
    """Over the even share of the ranks, without padding and without waiting."""
    for seed in range(4):
        widths = long_tailed(8, each, seed)
        even_share = sum(cost(row) for rows in widths for row in rows.reshape(-1, 1)) / 8
        packed = [cuts for (cuts,) in pack([[rows] for rows in widths], 32768)]
        first_come = waited(widths, [full(rows, 32768) for rows in widths]) / even_share
        in_lockstep = waited(widths, packed) / even_share
        assert before[0] <= first_come <= before[1]
        assert after[0] <= in_lockstep <= after[1]
