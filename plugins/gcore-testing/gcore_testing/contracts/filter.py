"""The contract of a filter.

Each group gets one verdict, from its numbers alone, and a reason when it is dropped.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.algorithms import GroupScalars
from gcore_testing.contracts.advantage import named_rewards_of
from gcore_testing.contracts.arguments import ASKS, snapshot, writable
from gcore_testing.contracts.base import Contract


class FilterContract(Contract):
    """To test a filter, override ``provider``, or the fixture ``group_filter``."""

    kind: ClassVar[str] = "filter"

    @pytest.fixture
    def group_filter(self) -> Any:
        return self.build()

    @pytest.fixture(
        params=[[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0], [0.5], [], [-2.0, 3.5, 1e6]]
    )
    def group(self, request: pytest.FixtureRequest) -> GroupScalars:
        rewards = np.array(request.param, np.float64)
        lengths = np.arange(1, rewards.size + 1, dtype=np.int64)
        named, weights = named_rewards_of(rewards)
        for array in (rewards, lengths, *named.values()):
            array.flags.writeable = False
        return GroupScalars(rewards=rewards, lengths=lengths, named=named, weights=weights)

    def test_a_verdict_is_a_truth_value_and_a_word(
        self, group_filter: Any, group: GroupScalars
    ) -> None:
        verdict, reason = group_filter.keep(group)
        assert isinstance(verdict, bool) and isinstance(reason, str)

    def test_what_is_dropped_has_a_named_reason(
        self, group_filter: Any, group: GroupScalars
    ) -> None:
        verdict, reason = group_filter.keep(group)
        assert verdict or reason.strip(), (
            f"rewards {group.rewards.tolist()} are dropped without a reason"
        )

    def test_the_same_group_gets_the_same_verdict(
        self, group_filter: Any, group: GroupScalars
    ) -> None:
        first = group_filter.keep(group)
        rewards = np.array([9.0, 9.0])
        named, weights = named_rewards_of(rewards)
        group_filter.keep(
            GroupScalars(rewards=rewards, lengths=np.array([1, 1]), named=named, weights=weights)
        )
        for _ in range(ASKS):
            assert group_filter.keep(group) == first

    def test_arguments_stay_as_they_are(self, group_filter: Any, group: GroupScalars) -> None:
        """In a run, arrays can be written to."""
        given = writable(group)
        group_filter.keep(given)
        assert snapshot(given) == snapshot(group), "the group was written to"

    def test_the_order_of_a_groups_records_does_not_matter(
        self, group_filter: Any, group: GroupScalars
    ) -> None:
        turned = GroupScalars(
            rewards=group.rewards[::-1].copy(),
            lengths=group.lengths[::-1].copy(),
            named={name: values[::-1].copy() for name, values in group.named.items()},
            weights=group.weights,
        )
        assert group_filter.keep(turned) == group_filter.keep(group)
