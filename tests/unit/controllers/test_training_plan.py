from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from gcore_core.builtin.balancer import InOrder
from gcore_core.contract.algorithms import Balancer, Work
from gcore_core.contract.errors import ContractError, TrainingError, WeightMismatch
from gcore_core.contract.records import Facts, Header, Ref
from gcore_core.controllers.training import (
    Plan,
    check_logprobs,
    learned_costs,
    make_plan,
    masked_share,
    restore_costs,
    train_item,
)
from gcore_core.runtime.messages import TrainItem, TrainReply

FACTS = [
    Facts(ordinal, sample, 5, ordinal + sample, 0.0) for ordinal in range(9) for sample in (0, 1)
]


class Loses(InOrder):
    def split(self, work: Work, bins: int) -> list[list[int]]:
        return [list(range(1, len(work))), *([] for _ in range(bins - 1))]


class TooFew(InOrder):
    def split(self, work: Work, bins: int) -> list[list[int]]:
        return [list(range(len(work)))]


class ShortestFirst(InOrder):
    """All to the last rank, the shortest first; keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[Work] = []

    def split(self, work: Work, bins: int) -> list[list[int]]:
        self.seen.append(work)
        return [*([] for _ in range(bins - 1)), np.argsort(work.lengths).tolist()]


def plan_of(
    facts: list[Facts], ranks: int, minibatches: int, seed: int, balancer: Balancer | None = None
) -> Plan:
    return make_plan(facts, ranks, minibatches, seed, balancer or InOrder()).plan


def test_every_record_has_one_place_whatever_the_order_of_the_facts() -> None:
    plan = plan_of(FACTS, 2, 3, 7)
    assert plan == plan_of(FACTS[::-1], 2, 3, 7)
    assert plan.keys() == {(fact.ordinal, fact.sample) for fact in FACTS}
    assert {place.rank for place in plan.values()} == {0, 1}


def test_a_group_is_never_split_over_minibatches() -> None:
    plan = plan_of(FACTS, 2, 3, 7)
    for ordinal in range(9):
        assert plan[ordinal, 0].minibatch == plan[ordinal, 1].minibatch


def test_minibatches_are_drawn_by_the_seed_and_not_by_length() -> None:
    planned = {s: [plan_of(FACTS, 1, 3, s)[o, 0].minibatch for o in range(9)] for s in range(20)}
    assert len({tuple(row) for row in planned.values()}) > 10
    longer = [Facts(f.ordinal, f.sample, 5, 100 - f.n_actions, 7.0) for f in FACTS]
    for seed in range(20):
        assert [plan_of(longer, 1, 3, seed)[o, 0].minibatch for o in range(9)] == planned[seed]


def test_no_balancer_can_change_the_minibatch_of_a_record() -> None:
    by_length = plan_of(FACTS, 2, 3, 7, ShortestFirst())
    assert {key: place.minibatch for key, place in by_length.items()} == {
        key: place.minibatch for key, place in plan_of(FACTS, 2, 3, 7).items()
    }
    assert {place.rank for place in by_length.values()} == {1}


def test_a_balancer_sees_one_minibatch_at_a_time_with_groups_together() -> None:
    balancer = ShortestFirst()
    facts = [Facts(o, s, 100 + o, 10 * o + s, 0.5 * s) for o in range(9) for s in (0, 1)]
    planned = make_plan(facts[::-1], 2, 3, 7, balancer)
    for minibatch, work in enumerate(balancer.seen):
        ordinals = sorted(
            {o for (o, _), place in planned.plan.items() if place.minibatch == minibatch}
        )
        assert work.group.tolist() == [o for o in ordinals for _ in (0, 1)]
        assert work.prompt.tolist() == [100 + o for o in ordinals for _ in (0, 1)]
        assert work.actions.tolist() == [10 * o + s for o in ordinals for s in (0, 1)]
        assert work.extra.tolist() == [0.5 * s for _ in ordinals for s in (0, 1)]


def test_loads_are_per_rank_and_imbalance_is_of_the_worst_minibatch() -> None:
    facts = [Facts(ordinal, 0, 0, length, 0.0) for ordinal, length in enumerate((1, 2, 3, 4))]
    planned = make_plan(facts, 2, 2, 7, InOrder())
    for rank, load in enumerate(planned.loads):
        assert sorted(load.group.tolist()) == sorted(
            o for (o, _), place in planned.plan.items() if place.rank == rank
        )
    worst = 0.0
    for minibatch in range(2):
        had = [0.0, 0.0]
        for (ordinal, _), place in planned.plan.items():
            had[place.rank] += facts[ordinal].n_actions * (place.minibatch == minibatch)
        worst = max(worst, max(had) / (sum(had) / 2))
    assert planned.imbalance == pytest.approx(worst)
    assert make_plan(facts, 1, 2, 7, InOrder()).imbalance == 1.0


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_a_negative_or_non_finite_cost_is_refused(cost: float) -> None:
    with pytest.raises(
        ContractError, match="balance: the cost of a record is negative or not finite"
    ):
        make_plan([*FACTS, Facts(9, 0, 5, 5, cost)], 2, 1, 7, InOrder())


def test_the_lead_holds_at_most_64_bytes_per_record() -> None:
    assert len(msgspec.msgpack.encode(Facts(2**63, 2**31, 2**31, 2**31, 1e300))) <= 64


@pytest.mark.parametrize(
    "balancer", [Loses(), TooFew()], ids=lambda balancer: type(balancer).__name__
)
def test_a_balancer_that_breaks_its_contract_is_named(balancer: Loses | TooFew) -> None:
    with pytest.raises(ContractError) as caught:
        make_plan(FACTS, 2, 1, 7, balancer)
    assert str(caught.value).splitlines() == [
        f"balance.use: balancer {type(balancer).__name__}: did not put each of 18 records on one "
        "of 2 ranks.",
        f"  at {__file__}:{type(balancer).split.__code__.co_firstlineno}",
        "  ask its author; its contract is gcore_testing.BalancerContract",
    ]


def test_a_step_without_groups_is_an_error_and_not_an_empty_update() -> None:
    with pytest.raises(TrainingError, match="no group was left to train on"):
        make_plan([], 2, 1, 7, InOrder())


@pytest.mark.parametrize("gap", [2e-3, float("nan")])
def test_log_probs_outside_the_band_end_the_run(gap: float) -> None:
    check_logprobs(3, {"logprob_gap_max": 1e-3}, 1e-3)
    with pytest.raises(WeightMismatch, match="step 3: generator and trainer disagree"):
        check_logprobs(3, {"logprob_gap_max": gap}, 1e-3)


def test_a_trainer_that_does_not_say_how_far_log_probs_differ_is_named() -> None:
    """A gap that nobody has measured is not a gap of 0."""
    with pytest.raises(ContractError, match="trainer theirs: train.. gave no metric logprob_gap"):
        check_logprobs(3, {"loss": 0.5, "logprob_gap_mean": 0.0}, 1e-3, "theirs")


def test_the_masked_share_is_that_of_all_ranks_together() -> None:
    replies = [TrainReply({}, 1, 0.0, 30, 10), TrainReply({}, 1), TrainReply({}, 1, 0.0, 0, 40)]
    assert masked_share(3, replies) == 50 / 80


@pytest.mark.parametrize(
    ("masked", "why"), [(7, "action_mask is 0 at all 14 actions"), (0, "records have no actions")]
)
def test_a_step_in_which_no_rank_trained_an_action_is_an_error(masked: int, why: str) -> None:
    replies = [TrainReply({}, 1, 0.0, 0, masked)] * 2
    with pytest.raises(TrainingError, match=f"(?s)^step 3: no action was trained on.*{why}"):
        masked_share(3, replies)


def test_a_worker_gets_all_that_the_header_of_its_record_says() -> None:
    ref = Ref("n", "s", 1, 2, 3, b"m")
    header = Header(
        ordinal=3,
        sample=1,
        row=4,
        seed=5,
        versions=(6, 7),
        columns=ref,
        slot=8,
        media={"image": ref},
        prompt_digest=9,
        seal=10,
        stamp=11,
        replica=12,
    )
    item = train_item(header, plan_of([Facts(3, 1, 5, 0, 0.0)], 1, 1, 7))
    both = set(Header.__struct_fields__) & set(TrainItem.__struct_fields__)
    assert {name: getattr(item, name) for name in both} == {
        name: getattr(header, name) for name in both
    }
    assert both >= {"replica", "stamp", "seal"}
    assert (item.version, item.last_version) == (6, 7)


class Learns(InOrder):
    """Keeps what it was given to go on with."""

    def __init__(self) -> None:
        self.given: Mapping[str, Any] = {}

    def state(self) -> dict[str, Any]:
        return {"seen": 3}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.given = state


def test_a_balancer_of_another_plugin_whose_class_has_the_same_name_gets_nothing() -> None:
    saved = learned_costs(Learns(), "mine/learns")
    same = Learns()
    restore_costs(same, saved, "mine/learns")
    assert same.given == {"seen": 3}
    other = Learns()
    restore_costs(other, saved, "another/learns")
    assert other.given == {}
