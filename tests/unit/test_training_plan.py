from __future__ import annotations

import numpy as np
import pytest

from gcore_core.controllers.training import check_logprobs, draw_plan
from gcore_core.errors import ContractError, TrainingError, WeightMismatch
from gcore_core.placement.balance import InOrder
from gcore_core.records import Facts

FACTS = [
    Facts(ordinal, sample, 5, ordinal + sample, float(ordinal + sample)) for ordinal in range(9) for sample in (0, 1)
]


class Loses:
    def split(self, costs: np.ndarray, bins: int) -> list[list[int]]:
        return [list(range(1, len(costs))), *([] for _ in range(bins - 1))]


class TooFew:
    def split(self, costs: np.ndarray, bins: int) -> list[list[int]]:
        return [list(range(len(costs)))]


def test_every_record_has_one_place_whatever_the_order_of_the_facts() -> None:
    plan = draw_plan(FACTS, 2, 3, 7, InOrder())
    assert plan == draw_plan(FACTS[::-1], 2, 3, 7, InOrder())
    assert plan.keys() == {(fact.ordinal, fact.sample) for fact in FACTS}
    assert {place.rank for place in plan.values()} == {0, 1}


def test_a_group_is_never_split_over_minibatches() -> None:
    plan = draw_plan(FACTS, 2, 3, 7, InOrder())
    for ordinal in range(9):
        assert plan[ordinal, 0].minibatch == plan[ordinal, 1].minibatch


def test_minibatches_are_drawn_by_the_seed_and_not_by_length() -> None:
    drawn = {s: [draw_plan(FACTS, 1, 3, s, InOrder())[o, 0].minibatch for o in range(9)] for s in range(20)}
    assert len({tuple(row) for row in drawn.values()}) > 10
    longer = [Facts(f.ordinal, f.sample, 5, 100 - f.n_actions, 100 - f.cost) for f in FACTS]
    for seed in range(20):
        assert [draw_plan(longer, 1, 3, seed, InOrder())[o, 0].minibatch for o in range(9)] == drawn[seed]


@pytest.mark.parametrize("balancer", [Loses(), TooFew()], ids=lambda balancer: type(balancer).__name__)
def test_a_balancer_that_breaks_its_contract_is_named(balancer: Loses | TooFew) -> None:
    with pytest.raises(ContractError) as caught:
        draw_plan(FACTS, 2, 1, 7, balancer)
    assert str(caught.value).splitlines() == [
        f"balance.use: {type(balancer).__name__} did not put each of 18 records on one of 2 ranks",
        "  ask its author; its contract is gcore_core.testing.BalancerContract",
    ]


def test_a_step_without_groups_is_an_error_and_not_an_empty_update() -> None:
    with pytest.raises(TrainingError, match="no group was left to train on"):
        draw_plan([], 2, 1, 7, InOrder())


@pytest.mark.parametrize("gap", [2e-3, float("nan")])
def test_log_probs_out_of_the_band_end_the_run(gap: float) -> None:
    check_logprobs(3, {"logprob_gap_max": 1e-3}, 1e-3)
    with pytest.raises(WeightMismatch, match="step 3: generator and trainer disagree"):
        check_logprobs(3, {"logprob_gap_max": gap}, 1e-3)
