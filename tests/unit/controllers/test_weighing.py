"""Rewards are normalised as their settings say, then weighted: whatever the shards, and whatever a
record lacks.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.job_settings import RewardSettings
from gcore_core.contract.records import Header
from gcore_core.controllers.reward_weights import group_scalars, statistics


def group(ordinal: int, *rewards: dict[str, float]) -> list[Header]:
    return [
        Header(ordinal=ordinal, sample=i, row=0, seed=0, rewards=found)
        for i, found in enumerate(rewards)
    ]


def rewards_of(
    one: list[Header], weighings: dict[str, RewardSettings], totals: np.ndarray | None = None
) -> np.ndarray:
    return group_scalars(one, weighings, totals).rewards


WEIGHINGS = {
    "plain": RewardSettings(weight=2.0),
    "within": RewardSettings(normalise="group"),
    "across": RewardSettings(weight=0.5, normalise="batch"),
}


@given(
    values=st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=2, max_size=9),
    shards=st.integers(1, 4),
)
def test_each_reward_is_normalised_as_configured_for_any_number_of_shards(
    values: list[list[float]], shards: int
) -> None:
    groups = [
        group(i, *({"plain": v, "within": v, "across": v} for v in row))
        for i, row in enumerate(values)
    ]
    totals = sum(statistics(groups[shard::shards], WEIGHINGS) for shard in range(shards))
    batch = np.array(values)
    for row, one in zip(values, groups, strict=True):
        own = np.array(row)
        found = rewards_of(one, WEIGHINGS, np.asarray(totals))
        expected = 2 * own
        if own.std() > 1e-5 * max(1, abs(own.mean())):
            expected = expected + (own - own.mean()) / own.std()
        elif own.std():
            continue  # what counts as equal is a matter of rounding
        if batch.std() > 1e-3 * max(1, abs(batch.mean())):
            expected = expected + 0.5 * (own - batch.mean()) / batch.std()
        elif batch.std():
            continue
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_before_the_step_is_complete_nothing_is_normalised() -> None:
    one = group(0, {"within": 3.0, "plain": 1.0}, {"within": 5.0, "plain": 0.0})
    np.testing.assert_array_equal(rewards_of(one, WEIGHINGS), [5.0, 5.0])


def test_a_missing_reward_adds_nothing_and_is_not_counted() -> None:
    groups = [group(0, {"across": 1.0}, {"across": 3.0}), group(1, {"plain": 1.0}, {"plain": 2.0})]
    totals = statistics(groups, WEIGHINGS)
    np.testing.assert_array_equal(totals, [[2, 4, 10]])
    np.testing.assert_allclose(rewards_of(groups[0], WEIGHINGS, totals), [-0.5, 0.5])
    np.testing.assert_array_equal(rewards_of(groups[1], WEIGHINGS, totals), [2.0, 4.0])


def normalised_in_group(*values: float) -> np.ndarray:
    weighings = {"judged": RewardSettings(normalise="group")}
    one = group(0, *({"judged": value} for value in values))
    return rewards_of(one, weighings, statistics([one], weighings))


def test_rewards_of_a_group_that_differ_by_rounding_normalise_to_nothing() -> None:
    np.testing.assert_array_equal(normalised_in_group(0.1 + 0.2, 0.3, 0.3), np.zeros(3))


def test_a_group_far_from_zero_keeps_its_differences() -> None:
    """The deviation is the population's, and nothing is added to it."""
    found = normalised_in_group(1e6, 1e6 + 0.25, 1e6 + 0.5, 1e6 + 0.75)
    expected = np.array([-1.5, -0.5, 0.5, 1.5]) / np.sqrt(1.25)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_differences_whose_squares_vanish_normalise_to_nothing() -> None:
    np.testing.assert_array_equal(normalised_in_group(0.0, 1e-170), np.zeros(2))


@pytest.mark.parametrize("how", ["group", "batch"])
def test_equal_rewards_normalise_to_zero(how: str) -> None:
    weighings = {"same": RewardSettings(normalise=how)}
    groups = [group(i, *[{"same": 0.1}] * 3) for i in range(2)]
    np.testing.assert_array_equal(
        rewards_of(groups[0], weighings, statistics(groups, weighings)), np.zeros(3)
    )


def test_each_named_reward_stands_by_itself_normalised_and_not_weighted() -> None:
    one = group(0, {"plain": 1.0, "within": 3.0}, {"plain": 2.0, "within": 5.0}, {"plain": 4.0})
    numbers = group_scalars(one, WEIGHINGS, statistics([one], WEIGHINGS))
    np.testing.assert_array_equal(numbers.named["plain"], [1.0, 2.0, 4.0])
    np.testing.assert_array_equal(numbers.named["within"], [-1.0, 1.0, np.nan])
    assert numbers.named["across"].shape == (3,)
    assert np.isnan(numbers.named["across"]).all()
    assert numbers.weights == {"plain": 2.0, "within": 1.0, "across": 0.5}


def test_the_weighted_sum_of_the_named_rewards_is_the_reward() -> None:
    one = group(0, {"plain": 1.0, "within": 3.0}, {"plain": 2.0, "within": 5.0}, {"plain": 4.0})
    numbers = group_scalars(one, WEIGHINGS, statistics([one], WEIGHINGS))
    total = sum(numbers.weights[name] * np.nan_to_num(numbers.named[name]) for name in WEIGHINGS)
    np.testing.assert_array_equal(numbers.rewards, total)


@pytest.mark.parametrize("weight", [1e10, -1e300, 1e308])
def test_a_weighted_sum_that_float32_cannot_hold_is_refused(weight: float) -> None:
    """Each reward fits, and a trainer would still compute with infinity, or with NaN."""
    one = group(2, {"a": 1.0, "b": 3e38}, {"a": 1.0, "b": 0.0})
    weighings = {"a": RewardSettings(), "b": RewardSettings(weight=weight)}
    with pytest.raises(ConfigError, match=r"record 2/0 is .* too large for a float32") as raised:
        rewards_of(one, weighings)
    assert raised.value.why == f"weights: a 1, b {weight:g}"
