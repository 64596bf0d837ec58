"""What a balancer promises: every index once, and no rank more burdened than by dealing in turn."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.testing.contracts.base import Contract

_CASES = ("mixed", "few", "empty", "one item", "more bins than items", "all equal", "one giant", "zeros", "sorted")
_ROUNDING = 1e-9  # of sums of costs in another order, relative


class BalancerContract(Contract):
    """Override ``provider``, or the fixture ``balancer``."""

    kind: ClassVar[str] = "balancer"

    @pytest.fixture
    def balancer(self) -> Any:
        return self.build()

    @pytest.fixture(params=_CASES)
    def case(self, request: pytest.FixtureRequest) -> tuple[np.ndarray, int]:
        """Costs, read-only, and a number of bins."""
        draw = np.random.default_rng(0)
        cases = {
            "mixed": (draw.lognormal(3, 1, 96), 8),
            "few": (draw.lognormal(3, 1, 10), 4),
            "empty": (np.zeros(0), 3),
            "one item": (np.array([7.0]), 1),
            "more bins than items": (np.array([3.0, 1.0]), 5),
            "all equal": (np.full(12, 5.0), 4),
            "one giant": (np.array([1.0, 1.0, 1.0, 1000.0, 1.0, 1.0]), 3),
            "zeros": (np.zeros(6), 2),
            "sorted": (np.arange(1.0, 33.0), 4),
        }
        costs, bins = cases[request.param]
        costs.flags.writeable = False
        return costs, bins

    def test_there_are_as_many_bins_as_asked_for(self, balancer: Any, case: tuple[np.ndarray, int]) -> None:
        costs, bins = case
        assert len(balancer.split(costs, bins)) == bins

    def test_every_index_is_in_one_bin(self, balancer: Any, case: tuple[np.ndarray, int]) -> None:
        costs, bins = case
        indexes = [int(index) for part in balancer.split(costs, bins) for index in part]
        assert sorted(indexes) == list(range(len(costs)))

    def test_the_same_costs_give_the_same_split(self, balancer: Any, case: tuple[np.ndarray, int]) -> None:
        costs, bins = case
        first = plain(balancer.split(costs, bins))
        balancer.split(costs[::-1].copy(), bins + 1)
        assert plain(balancer.split(costs, bins)) == first

    def test_it_is_never_worse_than_dealing_in_turn(self, balancer: Any, case: tuple[np.ndarray, int]) -> None:
        costs, bins = case
        largest = max((float(costs[part].sum()) for part in plain(balancer.split(costs, bins)) if part), default=0.0)
        dealt = max(float(costs[start::bins].sum()) for start in range(bins))
        assert largest <= dealt * (1 + _ROUNDING), f"the fullest bin has {largest:g}; dealing in turn gives {dealt:g}"

    def test_equal_costs_are_dealt_evenly(self, balancer: Any) -> None:
        for items, bins in ((12, 4), (13, 4), (3, 5)):
            counts = [len(part) for part in balancer.split(np.full(items, 2.0), bins)]
            assert max(counts) - min(counts) <= 1, f"{items} equal items in {bins} bins: {counts}"


def plain(split: Any) -> list[list[int]]:
    """The split in Python's own integers."""
    return [[int(index) for index in part] for part in split]
