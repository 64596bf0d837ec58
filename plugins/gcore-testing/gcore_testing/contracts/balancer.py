"""The contract of a balancer.

It gives every record to one rank, no rank has more work than by dealing in turn, and its costs are
usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.algorithms import LearnsCosts, Work
from gcore_testing.contracts.arguments import ASKS, snapshot, writable
from gcore_testing.contracts.base import Contract, claims

_CASES = (
    "mixed",
    "few",
    "empty",
    "one item",
    "more bins than items",
    "all equal",
    "one giant",
    "huge",
    "sorted",
    "many to a bin",
)
_ROUNDING = 1e-9  # of sums of costs in another order, relative


class BalancerContract(Contract):
    """To test a balancer, override ``provider``, or the fixture ``balancer``.

    tolerance: how far below 1 the R2 of its predictions may be, after it was shown times that
        follow one law.
    """

    kind: ClassVar[str] = "balancer"
    tolerance: ClassVar[float] = 0.1

    @pytest.fixture
    def balancer(self) -> Any:
        return self.build()

    @pytest.fixture(params=_CASES)
    def case(self, request: pytest.FixtureRequest) -> tuple[Work, int]:
        """Gives records, whose arrays are read-only, and a number of bins."""
        draw = np.random.default_rng(0)
        cases = {
            "mixed": (draw.lognormal(5, 1, 96), 8),
            "few": (draw.lognormal(5, 1, 10), 4),
            "empty": (np.zeros(0), 3),
            "one item": (np.array([7.0]), 1),
            "more bins than items": (np.array([30.0, 10.0]), 5),
            "all equal": (np.full(12, 5.0), 4),
            "one giant": (np.array([1.0, 1.0, 1.0, 1000.0, 1.0, 1.0]), 3),
            "huge": (np.full(6, 2.0**40), 2),
            "sorted": (np.arange(1.0, 33.0), 4),
            "many to a bin": (draw.lognormal(5, 1, 48), 2),
        }
        lengths, bins = cases[request.param]
        return work(lengths, extra=1e200 if request.param == "huge" else 0.0), bins

    def test_there_are_as_many_bins_as_asked_for(
        self, balancer: Any, case: tuple[Work, int]
    ) -> None:
        records, bins = case
        assert len(balancer.split(records, bins)) == bins

    def test_every_index_is_in_one_bin(self, balancer: Any, case: tuple[Work, int]) -> None:
        records, bins = case
        indexes = [int(index) for part in balancer.split(records, bins) for index in part]
        assert sorted(indexes) == list(range(len(records)))

    def test_the_same_records_give_the_same_split(
        self, balancer: Any, case: tuple[Work, int]
    ) -> None:
        records, bins = case
        first = plain(balancer.split(records, bins))
        balancer.split(records.take(range(len(records))[::-1]), bins + 1)
        for _ in range(ASKS):
            assert plain(balancer.split(records, bins)) == first

    def test_arguments_stay_as_they_are(self, balancer: Any, case: tuple[Work, int]) -> None:
        """In a run, arrays can be written to."""
        records, bins = case
        given = writable(records)
        balancer.costs(given)
        balancer.split(given, bins)
        assert snapshot(given) == snapshot(records), "the records' numbers were written to"

    def test_costs_are_finite_and_not_negative(self, balancer: Any, case: tuple[Work, int]) -> None:
        records, _ = case
        costs = balancer.costs(records)
        assert costs.shape == (len(records),)
        assert ((costs >= 0) & np.isfinite(costs)).all()

    def test_it_is_never_worse_than_dealing_in_turn(
        self, balancer: Any, case: tuple[Work, int]
    ) -> None:
        records, bins = case
        costs = balancer.costs(records)
        largest = max(
            (float(costs[part].sum()) for part in plain(balancer.split(records, bins)) if part),
            default=0.0,
        )
        dealt = max(float(costs[start::bins].sum()) for start in range(bins))
        assert largest <= dealt * (1 + _ROUNDING), (
            f"the fullest bin has {largest:g}; dealing in turn gives {dealt:g}"
        )

    def test_equal_records_are_dealt_evenly(self, balancer: Any) -> None:
        for items, bins in ((12, 4), (13, 4), (3, 5)):
            counts = [len(part) for part in balancer.split(work(np.full(items, 20.0)), bins)]
            assert max(counts) - min(counts) <= 1, f"{items} equal records in {bins} bins: {counts}"

    @claims("learns_costs")
    def test_it_predicts_the_times_it_was_shown(self, balancer: Any) -> None:
        """It learns a machine on which attention takes all the time, then one without that cost."""
        draw = np.random.default_rng(1)
        for law in (lambda length: 1e-8 * length**2, lambda length: 1e-5 * length):
            for _ in range(200):
                loads = [work(draw.lognormal(6, 1, draw.integers(4, 12))) for _ in range(4)]
                balancer.observe(loads, seconds(loads, law))
            loads = [work(draw.lognormal(6, 1, draw.integers(4, 12))) for _ in range(64)]
            predicted_s = np.array([balancer.costs(load).sum() for load in loads])
            measured_s = seconds(loads, law)
            r2 = float(np.corrcoef(predicted_s, measured_s)[0, 1]) ** 2
            assert r2 >= 1 - self.tolerance, (
                f"R2 {r2:.3f} of costs and the seconds they were learned from"
            )

    @claims("learns_costs")
    def test_what_it_is_shown_cannot_break_it(self, balancer: Any) -> None:
        """It is shown times that do not vary, that fall with length, or that are absurd."""
        loads = [work(np.full(n, 100.0)) for n in (1, 2, 3)]
        records = work(np.arange(1.0, 65.0))
        for times_s in (np.ones(3), np.array([3.0, 2.0, 1.0]), np.array([1e-9, 1e9, 1e-9])):
            r2 = balancer.observe(loads, times_s)
            assert r2 is None or (np.isfinite(r2) and r2 <= 1)
            costs = balancer.costs(records)
            assert ((costs >= 0) & np.isfinite(costs)).all() and costs.any()
            assert sorted(
                index for part in plain(balancer.split(records, 3)) for index in part
            ) == list(range(64))
            self.test_equal_records_are_dealt_evenly(balancer)

    def test_learning_is_claimed_or_absent(self, balancer: Any) -> None:
        assert isinstance(balancer, LearnsCosts) == self.claimed().learns_costs


def work(lengths: np.ndarray, extra: float = 0.0) -> Work:
    """Makes records of these lengths, two to a group; a fifth of each record is its prompt."""
    whole = lengths.astype(np.int64)
    prompt = whole // 5
    records = Work(
        group=np.arange(len(whole)) // 2,
        prompt=prompt,
        actions=whole - prompt,
        extra=np.full(len(whole), extra),
    )
    for column in (records.group, records.prompt, records.actions, records.extra):
        column.flags.writeable = False
    return records


def seconds(loads: Sequence[Work], law: Any) -> np.ndarray:
    """Returns the seconds of each load when a record takes ``law(length)`` seconds."""
    return np.array([float(law(load.lengths.astype(np.float64)).sum()) for load in loads])


def plain(split: Any) -> list[list[int]]:
    """Returns the split with Python's own integers."""
    return [[int(index) for index in part] for part in split]
