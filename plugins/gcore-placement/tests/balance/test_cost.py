"""What records cost before anything was measured, and what is learned from measured seconds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gcore_placement.balance.balancers import Cost, LptTokens, Snake
from gcore_placement.balance.config import CostConfig, TokensConfig
from gcore_placement.balance.cost import CostModel, features, nonnegative
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore_core.contract.algorithms import Work
from gcore_core.controllers.training import learned_costs, restore_costs

HIDDEN = 2048


def records(draw: np.random.Generator, groups: int, size: int = 4) -> Work:
    prompt = np.repeat(draw.integers(50, 500, groups), size)
    actions = draw.lognormal(6.5, 1, groups * size).astype(np.int64) + 1
    group = np.repeat(np.arange(groups), size)
    return Work(group=group, prompt=prompt, actions=actions, extra=np.zeros(len(group)))


def test_cost_of_a_record_is_its_tokens_plus_attention():
    work = Work(
        group=np.zeros(2),
        prompt=np.array([100, 100]),
        actions=np.array([300, 0]),
        extra=np.array([0.0, 7.0]),
    )
    costs = CostModel(HIDDEN, shared=False).costs(work)
    assert costs == pytest.approx([400 + 400**2 / (12 * HIDDEN), 100 + 100**2 / (12 * HIDDEN) + 7])


def test_a_prompt_encoded_once_is_counted_once_per_group():
    """k completions of A tokens after P: P + k A tokens, and P^2 + k (A^2 + 2 A P) pairs."""
    work = Work(
        group=np.zeros(3), prompt=np.full(3, 100), actions=np.array([10, 20, 30]), extra=np.zeros(3)
    )
    _, tokens, pairs, _ = features(work, shared=True).sum(0)
    assert tokens == pytest.approx(100 + 60)
    assert pairs == pytest.approx(100**2 + sum(a * a + 2 * a * 100 for a in (10, 20, 30)))
    assert (
        features(work.take([1]), shared=True).tolist()
        == features(work.take([1]), shared=False).tolist()
    )


def test_groups_stay_together_where_the_prompt_is_shared():
    work = records(np.random.default_rng(0), 24)
    for balancer in (Cost(CostConfig(prompts="shared")), LptTokens(TokensConfig(prompts="shared"))):
        parts = balancer.split(work, 5)
        assert sorted(i for part in parts for i in part) == list(range(len(work)))
        assert sum(len(set(work.group[part])) for part in parts) == 24
    assert sum(len(set(work.group[part])) for part in Cost(CostConfig()).split(work, 5)) > 24


@pytest.mark.parametrize("shared", [False, True])
def test_cost_terms_are_recovered_from_noisy_times_of_ranks(shared):
    """Ranks that the balancer itself made even, times off by 3 %: costs within 5 % of the truth,
    and R2 near 1.
    """
    draw = np.random.default_rng(3)
    balancer = Cost(
        CostConfig(hidden_size=64, prompts="shared" if shared else "each")
    )  # a prior that is far off
    truth = np.array([2e-3, 2e-5, 1.5e-9, 0.0])
    for _ in range(80):
        work = records(draw, int(draw.integers(16, 64)))
        loads = [work.take(part) for part in balancer.split(work, 8)]
        seconds = 0.05 + np.array([(features(load, shared) @ truth).sum() for load in loads])
        r2 = balancer.observe(loads, seconds * draw.normal(1, 0.03, 8))
    work = records(draw, 64)
    true = features(work, shared) @ truth
    predicted_costs = balancer.costs(work)
    assert np.abs(predicted_costs / predicted_costs.sum() - true / true.sum()).sum() < 0.05
    assert r2 is not None and 0.95 < r2 < 1


def test_learned_costs_are_restored_from_a_checkpoint():
    """Costs and R2 of the one that was restored are those of the one that was saved, bit for bit,
    from there on.
    """
    draw = np.random.default_rng(5)
    config = CostConfig(hidden_size=64)

    def teach(balancers: list[Cost]) -> list[float | None]:
        loads = [records(draw, 6) for _ in range(4)]
        seconds = np.array([load.lengths.sum() * 2e-5 for load in loads]) * draw.normal(1, 0.03, 4)
        return [balancer.observe(loads, seconds) for balancer in balancers]

    before = Cost(config)
    for _ in range(20):
        teach([before])
    saved = json.loads(json.dumps(learned_costs(before)))
    after = Cost(config)
    snake = Snake(config)
    fresh = Cost(config)
    for balancer in (after, snake):
        restore_costs(balancer, saved)
    work = records(draw, 16)
    assert (after.costs(work) == before.costs(work)).all()
    assert (after.costs(work) != fresh.costs(work)).all()
    assert (snake.costs(work) == fresh.costs(work)).all(), "what another balancer learned"
    for _ in range(5):
        scores = teach([before, after])
        assert scores[0] == scores[1] is not None
    assert (after.costs(work) == before.costs(work)).all()


def test_costs_without_measurements_equal_the_prior():
    work = records(np.random.default_rng(0), 4)
    fresh = Cost(CostConfig())
    for config in (CostConfig(), CostConfig(learn=False)):
        again = Cost(config)
        restore_costs(again, learned_costs(Cost(config)))
        assert (again.costs(work) == fresh.costs(work)).all()


def test_equally_loaded_ranks_leave_the_prior_unchanged():
    model = CostModel(HIDDEN, shared=False)
    work = records(np.random.default_rng(0), 8)
    before = model.costs(work)
    for _ in range(50):
        model.observe([work] * 4, np.full(4, 2.0))
    after = model.costs(work)
    assert after / after.sum() == pytest.approx(before / before.sum(), rel=0.02)
    assert after.sum() == pytest.approx(2.0, rel=0.02)


def test_r2_is_computed_on_steps_before_they_are_fitted():
    model = CostModel(HIDDEN, shared=False)
    draw = np.random.default_rng(0)
    work = [records(draw, n) for n in (1, 2, 3, 4)]
    assert model.observe(work, np.array([1.0, 2.0, 3.0, 4.0])) is None, (
        "nothing was predicted before the first step"
    )
    assert model.observe(work, np.array([4.0, 3.0, 2.0, 1.0])) < 0, "the opposite was predicted"


def test_without_learning_costs_stay_the_prior():
    balancer = Cost(CostConfig(learn=False))
    work = records(np.random.default_rng(0), 8)
    before = balancer.costs(work)
    assert balancer.observe([work, work], np.array([1.0, 5.0])) is None
    assert (balancer.costs(work) == before).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_the_fit_is_the_best_one_with_nonnegative_terms(seed, terms):
    """By its own conditions: the slope is zero where a term is positive, and not negative where it
    is zero.
    """
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(8, terms))
    gram = rows.T @ rows + 1e-3 * np.eye(terms)
    moment = draw.normal(size=terms)
    fitted = nonnegative(gram, moment)
    slope = gram @ fitted - moment
    assert (fitted >= 0).all()
    assert np.abs(slope[fitted > 0]).max(initial=0.0) < 1e-8
    assert (slope[fitted == 0] > -1e-8).all()
