from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore_core.contract.errors import DataError
from gcore_core.contract.order import row_of, sample_seed


def order(rows: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return [row_of(epoch * rows + index, rows, seed)[1] for index in range(rows)]


@given(rows=st.integers(1, 600), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 5))
def test_every_pass_visits_every_row_once(rows: int, seed: int, epoch: int) -> None:
    assert sorted(order(rows, seed, epoch)) == list(range(rows))


@pytest.mark.parametrize("rows", [4095, 4096, 4097, 20_000])
def test_larger_sizes_are_permutations_too(rows: int) -> None:
    assert len(set(order(rows))) == rows


def test_the_pass_is_the_ordinal_divided_by_the_rows() -> None:
    assert [row_of(ordinal, 10, 3)[0] for ordinal in (0, 9, 10, 29, 30)] == [0, 0, 1, 2, 3]


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = [order(50, seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(o) for o in orders}) == 16
    # two independent orders of 50 rows agree in one place on average
    same = [sum(a == b for a, b in zip(orders[0], other, strict=True)) for other in orders[1:]]
    assert max(same) <= 6


def test_the_order_is_the_same_in_every_process_and_version() -> None:
    assert order(8, seed=7) == [7, 1, 3, 5, 0, 6, 4, 2]
    assert row_of(123_456_789_012, 10_000_000, 7) == (12345, 6654863)


@pytest.mark.parametrize("rows", [3, 5, 8, 13])
def test_a_row_is_equally_likely_at_every_position(rows: int) -> None:
    passes = 3000
    counts = Counter(row_of(epoch * rows, rows, 1)[1] for epoch in range(passes))
    expected = passes / rows
    chi_square = sum((counts[row] - expected) ** 2 / expected for row in range(rows))
    assert chi_square < 40  # 12 degrees of freedom at most: exceeded once in 10,000 seeds


def test_neighbouring_rows_are_scattered() -> None:
    """A mean step of a third of the rows is what a random order has."""
    rows = 10_000
    places = order(rows)
    steps = [abs(a - b) for a, b in zip(places, places[1:], strict=False)]
    assert 0.30 < sum(steps) / len(steps) / rows < 0.37


def test_ten_million_rows_take_no_memory() -> None:
    tracemalloc.start()
    try:
        for ordinal in range(0, 30_000_000, 30_011):
            row_of(ordinal, 10_000_000, 5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_dataset_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="without rows"):
        row_of(0, 0, 1)


def test_sample_seeds_are_63_bit_and_differ_in_every_argument() -> None:
    base = (7, 11, 0, 3)
    seeds = [sample_seed(*base)]
    for place in range(4):
        seeds.append(sample_seed(*(value + (place == i) for i, value in enumerate(base))))
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 11, 0, 0) != sample_seed(11, 1, 0, 0)
