"""GDPO equals loops written from its paper, and what it promises of several rewards holds.

Tolerance 1e-10 in float64: the same sums in another order.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from gcore_algorithms.advantages import Gdpo, Grpo
from gcore_algorithms.config import GdpoConfig, GrpoConfig

from gcore_core.contract.algorithms import GroupScalars
from gcore_core.contract.errors import ConfigError

EPS = 1e-4
WEIGHTS = {"right": 1.0, "format": 0.5, "length": 2.0}


def group_of(named: dict[str, list[float]], lengths: list[int] | None = None) -> GroupScalars:
    columns = {name: np.array(values, np.float64) for name, values in named.items()}
    count = len(next(iter(columns.values())))
    total = np.zeros(count)
    for name, values in columns.items():
        total += WEIGHTS[name] * np.nan_to_num(values)
    return GroupScalars(
        rewards=total,
        lengths=np.array(lengths or [1] * count, np.int64),
        named=columns,
        weights={name: WEIGHTS[name] for name in columns},
    )


def groups_of(seed: int, count: int = 6) -> list[GroupScalars]:
    draw = np.random.default_rng(seed)
    groups = []
    for _ in range(count):
        size = int(draw.integers(2, 9))
        named = {
            "right": draw.integers(0, 2, size).tolist(),
            "format": draw.integers(0, 2, size).tolist(),
            "length": draw.normal(0.0, 100.0, size).tolist(),
        }
        groups.append(group_of(named, draw.integers(1, 30, size).tolist()))
    return groups


def estimate(advantage: Gdpo | Grpo, groups: list[GroupScalars]) -> list[np.ndarray]:
    return advantage.of(groups, advantage.statistics(groups))


def of_the_paper(groups: list[GroupScalars], per_action: bool) -> list[list[float]]:
    """Each reward over its group's deviation, weighted and added up, then over the batch's."""
    sums: list[list[float]] = []
    for group in groups:
        size = len(group.rewards)
        total = [0.0] * size
        for name, column in group.named.items():
            mean = sum(column) / size
            deviation = math.sqrt(sum((x - mean) ** 2 for x in column) / (size - 1))
            for i in range(size):
                total[i] += WEIGHTS[name] * (column[i] - mean) / (deviation + EPS)
        sums.append(total)
    batch = [
        value
        for group, total in zip(groups, sums, strict=True)
        for value, length in zip(total, group.lengths, strict=True)
        for _ in range(int(length) if per_action else 1)
    ]
    mean = sum(batch) / len(batch)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in batch) / len(batch))
    return [[(x - mean) / (deviation + EPS) for x in total] for total in sums]


@pytest.mark.parametrize("over", ["record", "action"])
@pytest.mark.parametrize("seed", range(5))
def test_gdpo_equals_the_papers_formula(over: str, seed: int) -> None:
    groups = groups_of(seed)
    found = estimate(Gdpo(GdpoConfig(normalise_over=over)), groups)
    for got, expected in zip(found, of_the_paper(groups, over == "action"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("over", ["record", "action"])
@pytest.mark.parametrize("shards", [2, 3, 9])
def test_gdpo_is_the_same_to_the_last_bit_for_any_shards(over: str, shards: int) -> None:
    made = Gdpo(GdpoConfig(normalise_over=over))
    groups = groups_of(3)
    parts = [made.statistics(groups[shard::shards]) for shard in range(shards)]
    for got, whole in zip(made.of(groups, sum(parts)), estimate(made, groups), strict=True):
        np.testing.assert_array_equal(got, whole)


def test_the_scale_of_a_reward_does_not_matter() -> None:
    """A thousandfold reward has the same say, unlike under GRPO; eps is 0, so exactly so."""
    groups = groups_of(4)
    scaled = [
        group_of(
            {name: (v * (1000 if name == "right" else 1)).tolist() for name, v in g.named.items()}
        )
        for g in groups
    ]
    made = Gdpo(GdpoConfig(eps=0.0))
    for one, other in zip(estimate(made, groups), estimate(made, scaled), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
    grpo = Grpo(GrpoConfig(eps=0.0))
    changes = [
        np.abs(one - other).max()
        for one, other in zip(estimate(grpo, groups), estimate(grpo, scaled), strict=True)
    ]
    assert max(changes) > 0.1


def test_groups_that_differ_in_their_rewards_do_not_collapse_into_one_advantage() -> None:
    """Of two records one has one reward here and both rewards there: GRPO cannot tell the groups
    apart, GDPO can (the paper's example).
    """
    one = group_of({"right": [0.0, 1.0], "format": [0.0, 0.0]})
    both = group_of({"right": [0.0, 1.0], "format": [0.0, 1.0]})
    collapsed = estimate(Grpo(GrpoConfig(eps=0.0)), [one, both])
    np.testing.assert_allclose(collapsed[0], collapsed[1], rtol=1e-12)
    apart = estimate(Gdpo(GdpoConfig(eps=0.0)), [one, both])
    assert apart[1][1] > 1.4 * apart[0][1]


def test_a_reward_that_a_record_lacks_is_normalised_over_the_records_that_have_it() -> None:
    nan = float("nan")
    lacking = group_of({"right": [1.0, 0.0, nan], "format": [0.0, 0.0, 1.0]})
    (got,) = estimate(Gdpo(GdpoConfig(eps=0.0)), [lacking])
    right = np.array([1.0, -1.0, 0.0]) / math.sqrt(2)
    form = np.array([-1.0, -1.0, 2.0]) / math.sqrt(3)
    total = right + 0.5 * form
    np.testing.assert_allclose(got, total / total.std(), rtol=1e-10)


def test_equal_rewards_give_exactly_zero_beside_other_groups() -> None:
    equal = group_of({"right": [0.1] * 3, "format": [1.0] * 3})
    noisy = group_of({"right": [0.1 + 0.2, 0.3, 0.3], "format": [1.0] * 3})
    alone = group_of({"right": [5.0], "format": [1.0]})
    mixed = group_of({"right": [0.0, 1.0], "format": [1.0, 1.0]})
    *zeros, last = estimate(Gdpo(GdpoConfig(eps=0.0)), [equal, noisy, alone, mixed])
    assert all((values == 0).all() for values in zeros)
    assert (last != 0).all()


def test_with_one_reward_gdpo_is_grpo_over_the_batchs_deviation() -> None:
    groups = [group_of({"right": g.named["length"].tolist()}) for g in groups_of(5)]
    grpo = np.concatenate(estimate(Grpo(GrpoConfig()), groups))
    found = np.concatenate(estimate(Gdpo(GdpoConfig()), groups))
    np.testing.assert_allclose(found, grpo / (grpo.std() + EPS), rtol=1e-10)


def test_gdpo_clips_last_of_all() -> None:
    plain = estimate(Gdpo(GdpoConfig()), groups_of(6))
    clipped = estimate(Gdpo(GdpoConfig(clip=0.5)), groups_of(6))
    assert max(np.abs(values).max() for values in plain) > 0.5
    for one, other in zip(plain, clipped, strict=True):
        np.testing.assert_array_equal(other, np.clip(one, -0.5, 0.5))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"group_size": 1}, "a group of 1 has no baseline"),
        ({"eps": -1.0}, "is negative"),
        ({"clip": 0.0}, "is not above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        GdpoConfig(**fields)
