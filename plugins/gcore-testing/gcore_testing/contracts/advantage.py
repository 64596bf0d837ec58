"""The contract of an advantage.

Its numbers follow from the groups alone, however these are spread over shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.algorithms import (
    ActionAdvantage,
    ActionScalars,
    Advantage,
    GroupScalars,
)
from gcore_testing.contracts.arguments import ASKS, snapshot, writable
from gcore_testing.contracts.base import Contract


class AdvantageContract(Contract):
    """To test an advantage of level "record", override ``provider``, or the fixture ``advantage``.

    tolerance: how much an advantage may differ, relative to the largest, or to 1 where that is
        larger.
    baseline: what a record is compared with, "group" or "batch". In a group of equal rewards,
        "group" gives zeros; "batch" need not.
    """

    kind: ClassVar[str] = "advantage"
    tolerance: ClassVar[float] = 1e-9
    baseline: ClassVar[str] = "group"

    @pytest.fixture
    def advantage(self) -> Any:
        return self.build()

    @pytest.fixture
    def groups(self, advantage: Any) -> list[GroupScalars]:
        """Gives whole groups, one with equal rewards, and one that lost all records but one."""
        size = advantage.group_size
        draw = np.random.default_rng(0)
        rewards = [draw.standard_normal(size) for _ in range(5)]
        rewards += [np.full(size, 0.1), np.array([0.7]), (np.arange(size) % 2).astype(float)]
        return [self.group(values, advantage.requires) for values in rewards]

    def group(self, rewards: np.ndarray, requires: frozenset[str]) -> GroupScalars:
        """Makes a group with these rewards, random lengths, and 0.25 for each required scalar.

        Its two named rewards add up to ``rewards`` and order the records as it does. All arrays are
        read-only.
        """
        draw = np.random.default_rng(rewards.size)
        lengths = draw.integers(1, 50, rewards.size)
        scalars = {name: np.full(rewards.size, 0.25) for name in sorted(requires)}
        named, weights = named_rewards_of(rewards)
        for array in (rewards, lengths, *scalars.values(), *named.values()):
            array.flags.writeable = False
        return GroupScalars(
            rewards=rewards, lengths=lengths, scalars=scalars, named=named, weights=weights
        )

    def test_it_is_an_advantage(self, advantage: Any) -> None:
        assert isinstance(advantage, Advantage), (
            "it lacks a member of gcore_core.contract.algorithms.Advantage"
        )
        assert_attributes(advantage)

    def test_each_record_has_one_finite_number(
        self, advantage: Any, groups: list[GroupScalars]
    ) -> None:
        advantages = whole(advantage, groups)
        assert [values.shape for values in advantages] == [group.rewards.shape for group in groups]
        for values in advantages:
            assert values.dtype == np.float64
            assert np.isfinite(values).all(), values

    def test_asking_twice_gives_the_same(self, advantage: Any, groups: list[GroupScalars]) -> None:
        first = whole(advantage, groups)
        whole(advantage, groups[::-1][:3])
        for _ in range(ASKS):
            for one, other in zip(first, whole(advantage, groups), strict=True):
                np.testing.assert_array_equal(one, other)

    def test_arguments_stay_as_they_are(self, advantage: Any, groups: list[GroupScalars]) -> None:
        """In a run, arrays can be written to. Statistics are those of all shards."""
        given = writable(groups)
        statistics = np.array(advantage.statistics(given))
        before = statistics.copy()
        advantage.of(given, statistics)
        assert snapshot(given) == snapshot(groups), "a group was written to"
        np.testing.assert_array_equal(statistics, before, "the statistics were written to")

    @pytest.mark.parametrize("shards", [2, 3, 9])
    def test_shards_do_not_matter(
        self, advantage: Any, groups: list[GroupScalars], shards: int
    ) -> None:
        """Statistics are summed over the shards. With more shards than groups, some have none."""
        parts = [groups[shard::shards] for shard in range(shards)]
        statistics = np.sum([advantage.statistics(part) for part in parts], axis=0)
        expected = whole(advantage, groups)
        for shard, part in enumerate(parts):
            advantages = advantage.of(part, statistics)
            assert len(advantages) == len(part)
            self._assert_close(advantages, expected[shard::shards])

    def test_the_order_of_groups_and_records_does_not_matter(
        self, advantage: Any, groups: list[GroupScalars]
    ) -> None:
        turned = [
            self.group(group.rewards[::-1].copy(), advantage.requires) for group in groups[::-1]
        ]
        restored = [values[::-1] for values in whole(advantage, turned)[::-1]]
        self._assert_close(restored, whole(advantage, groups))

    def test_a_batch_of_equal_rewards_teaches_nothing(self, advantage: Any) -> None:
        size = advantage.group_size
        groups = [self.group(np.full(size, 0.1), advantage.requires) for _ in range(3)]
        for values in whole(advantage, groups):
            assert not values.any(), values

    def test_rewards_that_are_equal_but_for_rounding_teach_nothing(self, advantage: Any) -> None:
        """Noise that is divided by its own deviation is of size 1: ask ``are_equal``."""
        rewards = np.where(np.arange(advantage.group_size) % 2, 0.1 + 0.2, 0.3)
        groups = [self.group(rewards.copy(), advantage.requires) for _ in range(3)]
        for values in whole(advantage, groups):
            assert (np.abs(values) <= self.tolerance).all(), f"rewards {rewards} give {values}"

    def test_a_group_of_equal_rewards_teaches_nothing(
        self, advantage: Any, groups: list[GroupScalars]
    ) -> None:
        """Its advantages are exactly zero, because a rounding error would be trained on."""
        if self.baseline == "batch":
            self.not_claimed("a baseline of the group")
        for group, values in zip(groups, whole(advantage, groups), strict=True):
            if np.ptp(group.rewards) == 0:
                assert not values.any(), f"rewards {group.rewards} give {values}"

    def test_a_higher_reward_never_has_a_lower_advantage(
        self, advantage: Any, groups: list[GroupScalars]
    ) -> None:
        for group, values in zip(groups, whole(advantage, groups), strict=True):
            ordered = values[np.argsort(group.rewards, kind="stable")]
            assert (np.diff(ordered) >= -self.tolerance).all(), (
                f"rewards {group.rewards} give {values}"
            )

    def _assert_close(self, actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
        for one, other in zip(actual, expected, strict=True):
            limit = self.tolerance * max(1.0, float(np.abs(other).max(initial=0.0)))
            np.testing.assert_allclose(one, other, rtol=0, atol=limit)


class ActionAdvantageContract(Contract):
    """To test one of level "action", override ``provider``, or the fixture ``advantage``."""

    kind: ClassVar[str] = "advantage"
    tolerance: ClassVar[float] = 1e-9

    @pytest.fixture
    def advantage(self) -> Any:
        return self.build()

    @pytest.fixture
    def actions(self, advantage: Any) -> list[ActionScalars]:
        """Gives records of 0, 1, 2 and 9 actions, and one without a trained action.

        Every third action is masked, the longest record was cut, and all arrays are read-only.
        """
        draw = np.random.default_rng(0)
        records = []
        for size in (0, 1, 2, 9, 3):
            mask = np.arange(size) % 3 != 1
            if size == 3:
                mask[:] = False
            names = sorted({*advantage.requires, "logp"})
            columns = {name: draw.standard_normal(size) for name in names}
            for array in (mask, *columns.values()):
                array.flags.writeable = False
            reward = float(draw.standard_normal())
            records.append(
                ActionScalars(reward=reward, mask=mask, truncated=size == 9, columns=columns)
            )
        return records

    def test_it_is_an_advantage(self, advantage: Any) -> None:
        assert isinstance(advantage, ActionAdvantage), (
            "it lacks a member of gcore_core.contract.algorithms.ActionAdvantage"
        )
        assert_attributes(advantage)

    def test_each_action_has_an_advantage_and_a_return(self, advantage: Any, actions: Any) -> None:
        for record in actions:
            for values in advantage.per_action(record):
                assert values.shape == record.mask.shape
                assert np.isfinite(values).all()
                assert not values[~record.mask].any(), "a masked action has one that is not 0"

    def test_masked_actions_have_no_influence(self, advantage: Any, actions: Any) -> None:
        """Other columns at masked actions do not change what trained actions get.

        The last action of a record that was cut is left as it is: the state behind it counts.
        """
        for record in actions:
            wild = ~record.mask
            wild[-1:] &= not record.truncated
            columns = {name: np.where(wild, -50.0, own) for name, own in record.columns.items()}
            other = advantage.per_action(replace(record, columns=columns))
            for one, two in zip(advantage.per_action(record), other, strict=True):
                np.testing.assert_allclose(one, two, rtol=0, atol=self.tolerance)

    def test_statistics_of_all_records_have_one_size_and_scale_finite_numbers(
        self, advantage: Any, actions: Any
    ) -> None:
        trained = [advantage.per_action(record)[0][record.mask] for record in actions]
        terms = [advantage.statistics(own) for own in trained]
        assert len({term.shape for term in terms}) == 1 and terms[0].ndim == 1
        for own in trained:
            scaled = advantage.of(own, sum(terms))
            assert scaled.shape == own.shape and np.isfinite(scaled).all()

    def test_arguments_stay_as_they_are(self, advantage: Any, actions: Any) -> None:
        """In a run, arrays can be written to."""
        for record in actions:
            columns = {name: own.copy() for name, own in record.columns.items()}
            given = replace(record, mask=record.mask.copy(), columns=columns)
            own = advantage.per_action(given)[0][given.mask]
            statistics = advantage.statistics(own)
            kept = own.copy(), statistics.copy()
            advantage.of(own, statistics)
            np.testing.assert_array_equal(given.mask, record.mask, "an argument was written to")
            for name in columns:
                np.testing.assert_array_equal(columns[name], record.columns[name], name)
            for now, before in zip((own, statistics), kept, strict=True):
                np.testing.assert_array_equal(now, before, "an argument was written to")

    def test_asking_twice_gives_the_same(self, advantage: Any, actions: Any) -> None:
        first = [advantage.per_action(record) for record in actions]
        for _ in range(ASKS):
            for record, expected in zip(actions, first, strict=True):
                for one, other in zip(advantage.per_action(record), expected, strict=True):
                    np.testing.assert_array_equal(one, other)


def assert_attributes(advantage: Any) -> None:
    assert isinstance(advantage.group_size, int) and advantage.group_size > 0
    assert isinstance(advantage.requires, frozenset)


def whole(advantage: Any, groups: Sequence[GroupScalars]) -> list[np.ndarray]:
    """Returns the advantages of a batch that one shard holds."""
    advantages: list[np.ndarray] = advantage.of(groups, advantage.statistics(groups))
    return advantages


def named_rewards_of(rewards: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Splits rewards, float64[S], into two named ones and their weights.

    Their weighted sum is ``rewards``, and each of them grows with it.
    """
    bounded = np.tanh(rewards) / 4
    return {"straight": rewards - 2 * bounded, "bounded": bounded}, {
        "straight": 1.0,
        "bounded": 2.0,
    }
