from __future__ import annotations

import numpy as np
import pytest

from gcore_core.builtin.filters import KeepAll, Varied
from gcore_core.contract.algorithms import Filter, GroupScalars


def group(*rewards: float) -> GroupScalars:
    return GroupScalars(
        rewards=np.array(rewards, dtype=np.float64), lengths=np.ones(len(rewards), dtype=np.int64)
    )


@pytest.mark.parametrize("filter_", [KeepAll(None), Varied(None), KeepAll(), Varied()])
def test_filters_follow_the_protocol(filter_: Filter) -> None:
    assert isinstance(filter_, Filter)


def test_keep_all_keeps_a_group_that_teaches_nothing() -> None:
    assert KeepAll(None).keep(group(1, 1)) == (True, "")


@pytest.mark.parametrize("rewards", [(0, 0, 0), (1, 1), (0.5,), ()])
def test_equal_rewards_do_not_teach(rewards: tuple[float, ...]) -> None:
    assert Varied(None).keep(group(*rewards)) == (False, "equal_rewards")


def test_rewards_that_differ_by_rounding_do_not_teach() -> None:
    assert Varied(None).keep(group(0.1 + 0.2, 0.3, 0.3)) == (False, "equal_rewards")


def test_one_different_reward_teaches() -> None:
    assert Varied(None).keep(group(0, 0, 1e-9)) == (True, "")
