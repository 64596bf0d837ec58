"""Judges and generators change devices at the pushes of a run whose generation runs ahead.

In virtual time, with the core's own shells. A generator that sleeps raises when it is asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gcore_testing.faults import FAULTS, Faults
from gcore_testing.simulation import run_virtual, simulate

from gcore_core.contract.errors import ContractError
from gcore_core.contract.factories import FactorySpec
from gcore_core.controllers.generation import producer
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.runtime.messages import TRAIN

from .test_faults import JOB, broken_rules, program

pytestmark = pytest.mark.rest

#: The border between the two roles moves at every step.
MOVING = replace(
    JOB,
    replicas=3,
    judges=3,
    placement=FactorySpec("gcore_testing.fake_judge:Turning"),
    overlaps=True,
)
CALM = Faults(0, rate=0.0, kills=0.0)


@pytest.mark.parametrize(("ahead", "age"), [(0, 0), (1, 1), (1, 4), (2, 4)])
def test_the_rules_hold_while_devices_move_at_every_push(
    ahead: int, age: int, tmp_path: Path
) -> None:
    """Messages are lost, late and doubled, and processes killed, awake or asleep."""
    hit = set()
    for seed in range(50_000, 50_006):
        job = replace(MOVING, shards=1 + seed % 3)
        weather = Faults(seed)
        made = program(ahead, age, "wait")
        outcome = run_virtual(simulate(job, tmp_path / str(seed), weather, made))
        assert not broken_rules(outcome, job, age), f"seed {seed}"
        hit |= {fault for _, _, fault in weather.hits}
    assert len(hit) >= len(FAULTS) - 1


def test_moves_do_not_change_what_a_deterministic_run_trains_on(tmp_path: Path) -> None:
    """In any weather and with any number of shards it ends as where nothing moves.

    Nobody is killed: often one generator is awake, so that no other holds the weights it needs.
    """
    made = program(1, 2, "wait")
    still = replace(MOVING, shards=1, deterministic=True, placement=None)
    expected = run_virtual(simulate(still, tmp_path / "still", CALM, made))
    for seed in range(4):
        job = replace(MOVING, shards=1 + seed % 3, deterministic=True)
        weather = Faults(seed, kills=0.0)
        outcome = run_virtual(simulate(job, tmp_path / str(seed), weather, made))
        assert outcome.batches == expected.batches, f"seed {seed}"
        assert outcome.begun == expected.begun, f"seed {seed}"
        assert outcome.logits == expected.logits, f"seed {seed}"
        assert outcome.ledger == expected.ledger, f"seed {seed}"


def test_no_request_is_left_when_placement_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that outlasts its last record: its replica may be about to sleep."""
    left = Counter[int]()
    ended = []
    draw = producer.draw
    decide = PlacementShard.decide

    async def outlasts(context: Any, placement: Any, ledger: Any, round_: Any, leases: Any) -> None:
        await draw(context, placement, ledger, round_, leases)
        if round_.purpose == TRAIN:
            shard = context.facts.shard
            left[shard] += 1
            try:
                await asyncio.Event().wait()
            finally:
                left[shard] -= 1
                ended.append(shard)

    async def decides(placement: PlacementShard, *told: int) -> None:
        assert not left.total(), "a draw is left"
        await decide(placement, *told)

    monkeypatch.setattr(producer, "draw", outlasts)
    monkeypatch.setattr(PlacementShard, "decide", decides)
    job = replace(MOVING, shards=1)
    made = program(1, 4, "wait")
    outcome = run_virtual(simulate(job, tmp_path / "store", CALM, made))
    assert not broken_rules(outcome, job, 4)
    assert len(ended) >= job.steps - 1, (
        "a round for the first two steps, and one for each later one"
    )


def test_a_policy_that_has_roles_take_turns_is_refused_by_name(tmp_path: Path) -> None:
    turns = FactorySpec("gcore_testing.fake_judge:InTurns")
    job = replace(MOVING, placement=turns)
    with pytest.raises(ContractError, match="no turn ends"):
        run_virtual(simulate(job, tmp_path / "store", CALM, program(1, 4, "wait")))


def test_pushes_wait_for_samples_where_devices_move(tmp_path: Path) -> None:
    outcome = run_virtual(simulate(MOVING, tmp_path, CALM, program(1, 4, "recompute")))
    assert not broken_rules(outcome, MOVING, 4)
    assert all(report.metrics["age/spanning_share"] == 0 for report in outcome.reports[1:])
    assert any("since the placement policy moves devices" in note for note in outcome.notes)
