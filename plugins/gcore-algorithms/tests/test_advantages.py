"""Advantages equal slow loops written from the papers, and do not depend on how groups are spread
over shards.

Tolerance 1e-12 in float64: the same sums in another order.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from gcore_algorithms import advantages, config

from gcore_core.contract.algorithms import ActionScalars, GroupScalars

MAKE = {
    "grpo": lambda **c: advantages.Grpo(config.GrpoConfig(**c)),
    "dr-grpo": lambda **c: advantages.DrGrpo(config.DrGrpoConfig(**c)),
    "rloo": lambda **c: advantages.Rloo(config.RlooConfig(**c)),
    "reinforce-pp": lambda **c: advantages.ReinforcePp(config.ReinforcePpConfig(**c)),
    "reinforce-pp-baseline": lambda **c: advantages.ReinforcePpBaseline(
        config.ReinforcePpBaselineConfig(**c)
    ),
}
each_estimator = pytest.mark.parametrize("name", list(MAKE))
EPS = 1e-4


def group(rewards, **scalars) -> GroupScalars:
    rewards = np.asarray(rewards, dtype=np.float64)
    return GroupScalars(
        rewards=rewards, lengths=np.ones(len(rewards), dtype=np.int64), scalars=scalars
    )


def groups_of(seed: int, n: int = 7) -> list[GroupScalars]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 9, n)
    return [group(rng.normal(3.0, 2.0, size), kl_k2=rng.normal(0.0, 1.0, size)) for size in sizes]


def estimate(advantage, groups: list[GroupScalars]) -> list[np.ndarray]:
    return advantage.of(groups, advantage.statistics(groups))


def reference(name: str, rewards: list[list[float]]) -> list[list[float]]:
    def mean(xs):
        return sum(xs) / len(xs)

    def std(xs, lost):
        return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - lost))

    if name == "grpo":
        return [[(r - mean(g)) / (std(g, 1) + EPS) for r in g] for g in rewards]
    if name == "dr-grpo":
        return [[r - mean(g) for r in g] for g in rewards]
    if name == "rloo":
        return [
            [r - mean([x for j, x in enumerate(g) if j != i]) for i, r in enumerate(g)]
            for g in rewards
        ]
    if name == "reinforce-pp-baseline":
        rewards = [[r - mean(g) for r in g] for g in rewards]
    batch = [r for g in rewards for r in g]
    return [[(r - mean(batch)) / (std(batch, 0) + EPS) for r in g] for g in rewards]


@each_estimator
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_an_advantage_equals_the_papers_formula(name, coefficient):
    groups = groups_of(1)
    made = MAKE[name](kl=config.RewardKlConfig(coefficient=coefficient, estimator="k2"))
    rewards = [list(g.rewards - coefficient * g.scalars["kl_k2"]) for g in groups]
    for got, expected in zip(estimate(made, groups), reference(name, rewards), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@each_estimator
@pytest.mark.parametrize("shards", [1, 2, 3, 9])
def test_an_advantage_does_not_depend_on_the_shards(name, shards):
    made, groups = MAKE[name](), groups_of(2)
    unsplit = estimate(made, groups)
    parts = [
        range(shard, len(groups), shards) for shard in range(shards)
    ]  # the last of 9 hold no group
    statistics = sum(made.statistics([groups[i] for i in part]) for part in parts)
    for part in parts:
        for i, got in zip(part, made.of([groups[i] for i in part], statistics), strict=True):
            np.testing.assert_allclose(got, unsplit[i], rtol=1e-12, atol=1e-12)


@each_estimator
@pytest.mark.parametrize("value", [0.1, -1e6, 0.0])
def test_equal_rewards_give_exactly_zero(name, value):
    groups = [group([value] * 3), group([value] * 8)]
    assert all((got == 0).all() for got in estimate(MAKE[name](), groups))


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo", "reinforce-pp-baseline"])
def test_equal_rewards_in_one_group_give_exactly_zero_beside_other_groups(name):
    uniform, mixed = estimate(MAKE[name](), [group([0.1] * 3), group([0.0, 1.0])])
    assert (uniform == 0).all()
    assert (mixed != 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo", "reinforce-pp-baseline"])
def test_a_record_that_lost_its_group_teaches_nothing(name):
    alone, empty, _ = estimate(MAKE[name](), [group([5.0]), group([]), group([0.0, 1.0])])
    assert alone.tolist() == [0.0]
    assert empty.size == 0


#: Rewards that are all 0.3, one of them added up from parts.
NOISE = [0.1 + 0.2, 0.3, 0.3, 0.3]


@each_estimator
def test_rewards_that_differ_by_rounding_give_exactly_zero(name):
    eps = {} if name in ("dr-grpo", "rloo") else {"eps": 0.0}
    assert len(set(NOISE)) == 2
    groups = [group(NOISE), group(NOISE[1:])]
    assert all((got == 0).all() for got in estimate(MAKE[name](**eps), groups))


@pytest.mark.parametrize("name", ["grpo", "reinforce-pp", "reinforce-pp-baseline"])
def test_a_difference_above_rounding_counts(name):
    (got,) = estimate(MAKE[name](eps=0.0), [group([1.0, 1.0 + 1e-13])])
    size = 1 / math.sqrt(2) if name == "grpo" else 1.0
    np.testing.assert_allclose(got, [-size, size], rtol=1e-3)


@each_estimator
def test_advantages_are_finite_where_squares_of_differences_vanish(name):
    eps = {} if name in ("dr-grpo", "rloo") else {"eps": 0.0}
    (got,) = estimate(MAKE[name](**eps), [group([0.0, 1e-170])])
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", ["reinforce-pp", "reinforce-pp-baseline"])
@pytest.mark.parametrize("spread", [1e-1, 1e-3, 1e-6])
def test_rewards_close_together_and_far_from_zero_keep_their_deviation(name, spread):
    """The std is between 1e-7 and 1e-12 of the mean."""
    draw = np.random.default_rng(5)
    groups = [group(1e6 + spread * draw.normal(size=8)) for _ in range(4)]
    batch = np.concatenate([g.rewards for g in groups])
    if name == "reinforce-pp":
        expected = (batch - statistics.fmean(batch)) / statistics.pstdev(batch.tolist())
    else:
        centred = np.concatenate([g.rewards - g.rewards.mean() for g in groups])
        expected = centred / math.sqrt(np.square(centred).mean())
    found = np.concatenate(estimate(MAKE[name](eps=0.0), groups))
    rounding = np.spacing(1e6) / spread
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * rounding + 1e-12)
    assert found.std() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", ["reinforce-pp", "reinforce-pp-baseline"])
@pytest.mark.parametrize("shards", [2, 3, 7])
def test_the_baseline_of_a_batch_is_the_same_to_the_last_bit_for_any_shards(name, shards):
    draw = np.random.default_rng(6)
    groups = [group(10.0 ** draw.integers(-8, 9) * draw.normal(size=5)) for _ in range(7)]
    made = MAKE[name]()
    parts = [made.statistics(groups[shard::shards]) for shard in range(shards)]
    for got, unsplit in zip(made.of(groups, sum(parts)), estimate(made, groups), strict=True):
        np.testing.assert_array_equal(got, unsplit)


@each_estimator
def test_no_groups_give_no_advantages(name):
    assert estimate(MAKE[name](), []) == []


def test_a_penalty_can_make_equal_rewards_differ():
    made = MAKE["dr-grpo"](kl=config.RewardKlConfig(coefficient=0.5))
    (got,) = estimate(made, [group([1.0, 1.0], kl_k1=np.array([0.0, 2.0]))])
    np.testing.assert_allclose(got, [0.5, -0.5], atol=1e-12)


# -- per action ------------------------------------------------------------------------------------


def record_of(mask, columns, reward=1.0, *, truncated=False):
    return ActionScalars(reward=reward, mask=mask, truncated=truncated, columns=columns)


def defined_gae(record, gamma, lam, kl=0.0, *, bootstrap=True):
    """(advantages, returns) of the trained actions, float64, written from the papers alone.

    Schulman et al. 2016, Eq. 16, as a sum over the errors that follow each action; Ouyang et al.
    2022 for what each action costs.
    """
    at = [t for t, is_trained in enumerate(record.mask) if is_trained]
    values = [float(record.columns["values"][t]) for t in at]
    last = float(record.columns["next_values"][-1]) if record.truncated and bootstrap else 0.0
    after = [*values[1:], last]
    rewards = [record.reward if t == at[-1] else 0.0 for t in at]
    if kl:
        gaps = [record.columns["logp"][t] - record.columns["ref_logp"][t] for t in at]
        rewards = [reward - kl * gap for reward, gap in zip(rewards, gaps, strict=True)]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    advantages = [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
        for t in range(len(deltas))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize(("kl", "bootstrap"), [(0.0, True), (0.3, True), (0.0, False)])
def test_gae_equals_its_definition_over_trained_actions(gamma, lam, kl, bootstrap, truncated):
    rng = np.random.default_rng(3)
    mask = rng.random(12) < 0.7
    names = ("values", "next_values", "logp", "ref_logp")
    record = record_of(
        mask, {name: rng.normal(size=12) for name in names}, reward=0.7, truncated=truncated
    )
    made = advantages.Gae(config.GaeConfig(gamma=gamma, lam=lam, kl=kl, bootstrap=bootstrap))
    got, returns = made.per_action(record)
    expected, targets = defined_gae(record, gamma, lam, kl, bootstrap=bootstrap)
    np.testing.assert_allclose(got[mask], expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(returns[mask], targets, rtol=1e-10, atol=1e-10)
    assert not got[~mask].any()
    assert not returns[~mask].any()


def test_masked_actions_have_no_influence_on_gae():
    made = advantages.Gae(config.GaeConfig(kl=0.5))
    mask = np.array([1, 0, 1, 0], dtype=bool)
    columns = {name: np.array([0.5, 0.0, 0.25, 0.0]) for name in ("values", "logp", "ref_logp")}
    columns["next_values"] = np.zeros(4)
    wild = {name: np.where(mask, own, np.nan) for name, own in columns.items()}
    for got, expected in zip(
        made.per_action(record_of(mask, wild)),
        made.per_action(record_of(mask, columns)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)
    nothing = np.zeros(4, dtype=bool)
    assert made.per_action(record_of(nothing, columns))[0].tolist() == [0.0] * 4
    empty = {name: np.zeros(0) for name in columns}
    assert made.per_action(record_of(nothing[:0], empty, truncated=True))[0].size == 0


def test_a_cut_record_is_worth_more_by_the_discounted_value_behind_it():
    made = advantages.Gae(config.GaeConfig(gamma=0.5, lam=1.0))
    columns = {"values": np.zeros(2), "next_values": np.array([0.0, 8.0])}
    mask = np.ones(2, bool)
    ended, cut = (
        made.per_action(record_of(mask, columns, truncated=truncated))[1]
        for truncated in (False, True)
    )
    assert ended.tolist() == [0.5, 1.0]
    assert cut.tolist() == [0.5 + 2.0, 1.0 + 4.0]


def test_gae_at_lambda_one_is_the_return_less_the_value():
    made = advantages.Gae(config.GaeConfig(gamma=1.0, lam=1.0))
    columns = {"values": np.array([0.1, 0.2, 0.3]), "next_values": np.zeros(3)}
    got, returns = made.per_action(record_of(np.ones(3, dtype=bool), columns, reward=6.0))
    np.testing.assert_allclose(returns, [6.0, 6.0, 6.0], rtol=1e-12)
    np.testing.assert_allclose(got, 6.0 - columns["values"], rtol=1e-12)


def test_whitened_advantages_have_mean_0_and_variance_1_over_all_records():
    made = advantages.Gae(config.GaeConfig(whiten=True))
    rng = np.random.default_rng(5)
    rows = [rng.normal(2.0, 3.0, size=n) for n in (3, 0, 5, 1)]
    sums = sum(made.statistics(row) for row in rows)
    whitened = np.concatenate([made.of(row, sums) for row in rows])
    assert whitened.mean() == pytest.approx(0.0, abs=1e-10)
    assert whitened.var() == pytest.approx(1.0, abs=1e-8)
    equal = np.full(4, 0.1)
    assert not np.abs(made.of(equal, made.statistics(equal))).max() > 1e-6
    plain = advantages.Gae(config.GaeConfig())
    assert plain.statistics(rows[0]).size == 0
    assert plain.of(rows[0], np.zeros(0)) is rows[0]
