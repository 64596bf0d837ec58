"""Whole runs in virtual time, with the core's own shells: lost, late and doubled messages, killed
processes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from gcore_async.config import AsyncConfig
from gcore_async.program import AsynchronousController
from gcore_testing.faults import FAULTS, Faults
from gcore_testing.simulation import Outcome, Program, SimulatedJob, run_virtual, simulate

from gcore_core.contract.records import TRAINED
from gcore_core.kits.programs import ControllerContext, Producer, SyncConfig

pytestmark = pytest.mark.rest

JOB = SimulatedJob(
    shards=2,
    replicas=3,
    ranks=2,
    judges=1,
    prompts=4,
    samples=2,
    steps=5,
    evaluate_prompts=2,
    evaluate_every=2,
    takes_stale=True,
    filter="gcore_core.builtin.filters:Varied",
)
WINDOWS = [
    (1, 1, "wait"),
    (1, 4, "recompute"),
    (2, 4, "recompute"),
    (2, 2, "wait"),
]


def program(ahead: int, age: int, midway: str) -> Program:
    def made(config: SyncConfig, context: ControllerContext) -> AsynchronousController:
        bounds = {"ahead": ahead, "age": age, "midway": midway}
        return AsynchronousController(AsyncConfig(**(asdict(config) | bounds)), context)

    return made


def broken_rules(outcome: Outcome, job: SimulatedJob, age: int) -> list[str]:
    """Returns the rules that a run broke, of those that hold in any weather."""
    batches = [sorted({key[0] for key in batch}) for batch in outcome.batches]
    verdicts = outcome.verdicts
    committed = sorted(ordinal for _, ordinal in verdicts)
    trained = sorted(o for (_, o), given in verdicts.items() if given == [TRAINED])
    base = outcome.ledger["next_ordinal"]
    steps = [report.metrics for report in outcome.reports[1:]]
    holds = {
        "every ordinal has one verdict": len(set(committed)) == len(committed)
        and max(map(len, verdicts.values())) == 1,
        "every ordinal below the base has its verdict": committed[:base] == list(range(base)),
        "what is trained has that verdict": trained == sorted(itertools.chain(*batches)),
        "steps are full": [len(step) for step in batches] == [job.prompts] * job.steps,
        "every step reports once": [report.step for report in outcome.reports]
        == list(range(job.steps + 1)),
        "no record is older than promised": max(step["age/largest"] for step in steps) <= age,
    }
    return [name for name, is_kept in holds.items() if not is_kept]


@pytest.mark.parametrize(("ahead", "age", "midway"), WINDOWS)
def test_the_rules_hold_when_messages_are_lost_and_processes_killed(
    ahead: int, age: int, midway: str, tmp_path: Path
) -> None:
    hit = set()
    largest = 0.0
    for seed in range(30_000, 30_006):
        job = replace(JOB, shards=1 + seed % 3)
        weather = Faults(seed)
        made = program(ahead, age, midway)
        outcome = run_virtual(simulate(job, tmp_path / str(seed), weather, made))
        assert not broken_rules(outcome, job, age), f"seed {seed}"
        # said again by a run that begins again from a checkpoint
        assert any("2 updates a step" in note for note in outcome.notes)
        hit |= {fault for _, _, fault in weather.hits}
        largest = max(largest, *(report.metrics["age/largest"] for report in outcome.reports[1:]))
    assert len(hit) >= len(FAULTS) - 1
    assert largest >= ahead, "nothing ran ahead"


@pytest.mark.parametrize("midway", ["wait", "recompute"])
def test_only_a_push_that_goes_on_cuts_samples(midway: str, tmp_path: Path) -> None:
    shares = []
    for seed in range(4):
        job = replace(JOB, steps=6, max_new_tokens=24, judges=0)
        made = program(1, 4, midway)
        outcome = run_virtual(
            simulate(job, tmp_path / str(seed), Faults(seed, rate=0.0, kills=0.0), made)
        )
        shares += [report.metrics["age/spanning_share"] for report in outcome.reports[1:]]
    assert (max(shares) > 0) == (midway != "wait")


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_begun_while_a_push_waits_unless_a_run_is_to_repeat(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as one of two shards waits, neither begins what replaces groups without a lesson."""
    look = Producer._look
    draw = Producer._draw
    waited = Counter[bool]()
    begun = Counter[bool]()

    async def noted_look(producer: Producer) -> None:
        own = producer._push_waits
        await look(producer)
        together = producer._schedule.push_waits
        assert together or not own, "a shard waits, and others do not know it"
        waited[own] += together

    def noted_draw(producer: Producer, ordinals: list[int]) -> None:
        begun[producer._schedule.push_waits] += 1
        draw(producer, ordinals)

    monkeypatch.setattr(Producer, "_look", noted_look)
    monkeypatch.setattr(Producer, "_draw", noted_draw)
    for seed in range(6):
        job = replace(JOB, judges=0, steps=6, deterministic=deterministic)
        run_virtual(simulate(job, tmp_path / str(seed), Faults(seed), program(1, 2, "wait")))
    assert waited[True] and waited[False], "one shard never waited for the other"
    assert bool(begun[True]) == deterministic


def test_with_nothing_ahead_it_trains_as_the_synchronous_program(tmp_path: Path) -> None:
    """The same records in the same steps, the same weights and the same digests."""
    for seed in range(6):
        job = replace(JOB, shards=1 + seed % 3, seed=seed, deterministic=True)
        sync = run_virtual(simulate(job, tmp_path / f"{seed}s", Faults(seed)))
        made = program(0, 0, "wait")
        found = run_virtual(simulate(job, tmp_path / f"{seed}a", Faults(seed), made))
        assert found.batches == sync.batches
        assert found.logits == sync.logits
        assert found.ledger == sync.ledger
        digests = [[report.digests for report in run.reports] for run in (found, sync)]
        assert digests[0] == digests[1]


def test_a_deterministic_run_ahead_does_not_depend_on_shards_or_weather(tmp_path: Path) -> None:
    """Also where generators are killed during an update: others hold the weights they need."""
    ended = []
    for seed in range(4):
        job = replace(JOB, shards=1 + seed % 3, deterministic=True)
        made = program(1, 2, "recompute" if seed % 2 else "wait")  # its pushes wait all the same
        weather = Faults(seed, kills=0.005)
        outcome = run_virtual(simulate(job, tmp_path / str(seed), weather, made))
        ended.append((outcome.batches, outcome.begun, outcome.logits, outcome.ledger))
    assert all(one == ended[0] for one in ended)
