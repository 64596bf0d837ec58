from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gcore_language.exact_sums import LARGEST_SUM, ExactSum, exact_norm, sum_of
from torch import Tensor


class Alone:
    """The collectives of a single rank."""

    def sum(self, values: list[float]) -> list[float]:
        return values

    def max(self, values: list[float]) -> list[float]:
        return values


class Together:
    """The collectives of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._said: list[list[float]] = []

    def _hear(self, values: list[float]) -> list[tuple[float, ...]]:
        """Returns for each element what all ranks said."""
        self._said.append(values)
        self._barrier.wait()
        heard = list(zip(*self._said, strict=True))
        self._barrier.wait()
        self._said = []
        self._barrier.wait()
        return heard

    def sum(self, values: list[float]) -> list[float]:
        return [sum(column) for column in self._hear(values)]

    def max(self, values: list[float]) -> list[float]:
        return [max(column) for column in self._hear(values)]


def vectors(count: int, size: int, seed: int = 0) -> list[Tensor]:
    """Numbers of both signs and of magnitudes from 1e-12 to 1e4."""
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(count, size)) * 10.0 ** draw.uniform(-12, 4, (count, size))
    return list(torch.from_numpy(values.astype(np.float32)))


def summed(parts: list[Tensor]) -> Tensor:
    total = ExactSum(len(parts[0]), torch.device("cpu"))
    for part in parts:
        total.add(part)
    return total.take()


def test_a_sum_has_the_same_bits_in_any_order() -> None:
    parts = vectors(40, 70_000)  # more than one chunk
    expected = summed(parts)
    plain = torch.stack(parts).sum(0)
    other_plain = torch.stack(parts[::-1]).sum(0)
    assert not torch.equal(plain, other_plain), "addition in float32 depends on the order"
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(40)
        assert torch.equal(summed([parts[i] for i in order]), expected)


def test_a_sum_is_the_true_one_rounded() -> None:
    parts = vectors(9, 200)
    true = [math.fsum(column) for column in zip(*(p.double().tolist() for p in parts), strict=True)]
    np.testing.assert_allclose(summed(parts).numpy(), true, rtol=1e-7, atol=1e-18)


def test_a_sum_is_new_after_it_was_taken() -> None:
    total = ExactSum(2, torch.device("cpu"))
    total.add(torch.tensor([1.0, 2.0]))
    total.take()
    total.add(torch.tensor([3.0, 4.0]))
    assert total.take().tolist() == [3.0, 4.0]


@pytest.mark.parametrize("value", [LARGEST_SUM, -LARGEST_SUM, math.inf, math.nan])
def test_a_sum_that_cannot_be_exact_is_nan_even_where_large_parts_cancel(value: float) -> None:
    total = ExactSum(1, torch.device("cpu"))
    total.add(torch.tensor([value]))
    total.add(torch.tensor([-value]))
    assert math.isnan(total.take().item())


def test_a_norm_has_the_same_bits_however_numbers_are_dealt() -> None:
    (values,) = vectors(1, 5_003)
    expected = exact_norm([values], Alone())
    assert expected == pytest.approx(float(values.double().norm()), rel=1e-12)
    for cuts in ((1, 17, 4_000), (2_500,), (5_002,)):
        parts = list(torch.tensor_split(values, cuts))
        assert exact_norm(parts, Alone()) == expected
        assert exact_norm(parts[::-1], Alone()) == expected


def test_a_norm_has_the_same_bits_on_any_number_of_ranks() -> None:
    (values,) = vectors(1, 999)
    expected = exact_norm([values], Alone())
    for ranks in (2, 3, 4):
        together = Together(ranks)
        with ThreadPoolExecutor(ranks) as pool:
            parts = torch.tensor_split(values, ranks)
            norms = list(pool.map(lambda part: exact_norm([part], together), parts))  # noqa: B023
        assert norms == [expected] * ranks


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_of_numbers_that_are_not_finite_is_not_finite(value: float) -> None:
    assert not math.isfinite(exact_norm([torch.tensor([1.0, value])], Alone()))


def test_a_norm_of_nothing_is_zero() -> None:
    assert exact_norm([], Alone()) == 0.0
    assert exact_norm([torch.zeros(3)], Alone()) == 0.0


@pytest.mark.parametrize("tiny", [1e-38, 1e-30, 1e30])
def test_a_norm_neither_underflows_nor_overflows(tiny: float) -> None:
    values = torch.full((100,), tiny, dtype=torch.float32)
    expected = float(values.double().norm())
    assert exact_norm([values], Alone()) == pytest.approx(expected, rel=1e-12)


def test_a_sum_of_floats_does_not_depend_on_their_order() -> None:
    values = [1e16, 1.0, -1e16, 1e-3] * 5
    assert sum_of(values) == sum_of(sorted(values)) == 5.005
    assert sum_of([math.inf, 1.0]) == math.inf
    assert math.isnan(sum_of([math.inf, -math.inf]))
    assert sum_of([]) == 0.0
