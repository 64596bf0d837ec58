"""Judges, groups that are left over and replicas that move: in any weather they change when things
happen, not what.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gcore_testing.simulation import Outcome, SimulatedJob, Storm, run_virtual, simulate

from gcore_core.contract import engine_profiles, measurements, run_files
from gcore_core.contract.errors import ContractError
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.placement import Decision, Device, Partition, Window, place_evenly
from gcore_core.controllers.placement.lead import Last, PlacementLead
from gcore_core.controllers.placement.sleepers import Sleepers
from gcore_core.runtime.placement_decisions import prepare_policy
from gcore_core.runtime.worker_settings import PlacementFacts

VARIED = "gcore_core.builtin.filters:Varied"
JUDGED = SimulatedJob(
    shards=1, replicas=3, judges=3, steps=4, prompts=4, samples=2, evaluate_prompts=2, scorers=1
)


def run(
    directory: Path, storm: int | None = None, job: SimulatedJob = JUDGED, **changes: object
) -> Outcome:
    job = SimulatedJob(**{**vars(job), **changes})  # type: ignore[arg-type]
    return run_virtual(simulate(job, directory / "store", None if storm is None else Storm(storm)))


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("still"))


@pytest.mark.parametrize("policy", ["Turning", "InTurns"])
@pytest.mark.parametrize("storm", range(6))
def test_moving_replicas_at_every_step_does_not_change_the_result(
    policy: str, storm: int, still: Outcome, tmp_path: Path
) -> None:
    """Whoever is asleep raises when it is asked, so routing is tested too."""
    placement = FactorySpec(f"gcore_testing.fake_judge:{policy}")
    found = run(tmp_path, storm, shards=1 + storm % 4, placement=placement, rests=storm % 2 > 0)
    assert found.logits == still.logits
    assert found.batches == still.batches
    judged = [report.metrics["reward/asked"] for report in found.reports[1:]]
    assert judged == pytest.approx([report.metrics["reward/asked"] for report in still.reports[1:]])
    assert len({round(value, 6) for value in judged}) > 1, (
        "the judge says the same of everything: this tests nothing"
    )


@pytest.mark.parametrize("storm", range(4))
def test_a_group_reward_gets_whole_groups(storm: int, still: Outcome, tmp_path: Path) -> None:
    """The fake judge scores records one by one, so the rewards are those of a reward of records."""
    found = run(tmp_path, storm, shards=1 + storm, level="group")
    assert found.logits == still.logits


def steady(outcome: Outcome) -> list[dict[str, float]]:
    """The group counts of each step."""
    return [
        {
            name.removeprefix("groups/"): value
            for name, value in report.metrics.items()
            if name.startswith("groups/")
        }
        for report in outcome.reports[1:]
    ]


@pytest.mark.parametrize("takes_stale", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_every_issued_group_is_kept_dropped_or_left_over(
    shards: int, takes_stale: bool, tmp_path: Path
) -> None:
    changes = {
        "steps": 6,
        "prompts": 6,
        "filter": VARIED,
        "takes_stale": takes_stale,
        "evaluate_prompts": 0,
    }
    found = run(tmp_path, shards, shards=shards, judges=0, **changes)
    consumed = 0
    for counts, batch in zip(steady(found), found.batches, strict=True):
        dropped = sum(value for name, value in counts.items() if name.startswith("dropped/"))
        assert counts["issued"] == counts["kept"] + dropped + counts["surplus"]
        assert counts["kept"] == counts["trained"] == len({ordinal for ordinal, _, _ in batch}) == 6
        consumed += round(counts["kept"] + dropped)
    assert found.ledger["next_ordinal"] == consumed, "what is left over is not consumed"
    taken = [
        ordinal
        for batch in found.batches
        for ordinal in sorted({ordinal for ordinal, _, _ in batch})
    ]
    assert taken == sorted(set(taken)), "no group is taken twice, and steps take them in order"


def test_left_over_groups_are_used_by_the_next_step_if_the_objective_allows(
    tmp_path: Path,
) -> None:
    job = SimulatedJob(
        shards=2, steps=8, prompts=6, samples=2, filter=VARIED, evaluate_prompts=0, replicas=2
    )
    kept = run(tmp_path / "kept", 1, job, takes_stale=True)
    redrawn = run(tmp_path / "redrawn", 1, job)
    assert not any(redrawn.stale)
    counts = steady(kept)
    carried = [count["surplus_carried"] for count in counts]
    assert any(carried), "nothing was left over: this tests nothing"
    for before, stale, batch in zip(carried, kept.stale[1:], kept.batches[1:], strict=False):
        assert len(stale) <= before
        assert stale <= set(sorted({ordinal for ordinal, _, _ in batch})[: len(stale)]), (
            "they are the lowest ones"
        )
    assert sum(count["issued"] for count in counts) - sum(carried) < sum(
        c["issued"] for c in steady(redrawn)
    )


def mover(saved: dict[str, Any], directory: str = "", policy: Any = None) -> PlacementLead:
    """The lead's mover, of a run that begins or, with what was saved, is resumed."""
    facts = PlacementFacts(
        devices=[Device(index=0, kind="cpu", node="n")],
        slots={"rollout": 1},
        needs={},
        engines={"rollout": [[0]]},
        sleeps=[],
        directory=directory,
    )
    told = SimpleNamespace(placement=facts, state={"placement": saved})
    context: Any = SimpleNamespace(facts=told, placement=policy or object())
    return PlacementLead(context, {}, Sleepers({}, (), ()))


def test_a_resumed_run_gives_its_placement_policy_the_earlier_measurements() -> None:
    before = mover({"policy": {"weight": 0.5}})
    before._outcomes = [
        measurements.Outcome(
            step=1, candidate="a", predicted_s=np.float64(2.5), measured_s=3.0, work=7.0
        )
    ]
    fit = engine_profiles.EngineFit(profile=engine_profiles.Profile(base_s=0.5), requests=70)
    before._saved_account = measurements.Account(
        engines={"rollout": fit}, waited={0: 1.0}, state={"most": np.float64(3.0)}
    )
    window = mover(json.loads(json.dumps(before.learned())))._make_window(2, Last())
    assert window.state == {"weight": 0.5}
    assert window.outcomes == (
        measurements.Outcome(step=1, candidate="a", predicted_s=2.5, measured_s=3.0, work=7.0),
    )
    assert window.account == measurements.Account(engines={"rollout": fit}, state={"most": 3.0})


def test_a_journal_that_cannot_be_written_is_told_once_and_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lead = mover({}, directory=str(tmp_path / "run"))
    for step in (1, 2):
        lead._write(run_files.Measured(step=step, measured_s=1.0))
    (message,) = caplog.messages
    assert "placement.jsonl cannot be written" in message


class Accounts:
    """A policy that counts what it was told of, in its account."""

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        count = window.account.state.get("count", 0) + len(window.requests)
        told = window.rollout
        account = measurements.Account(
            metrics={"told": float(count)}, waited={0: told.seconds}, state={"count": count}
        )
        return replace(place_evenly(partition, window), account=account)


async def test_a_policy_measures_and_its_account_is_written_with_what_its_decision_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = mover({}, directory=str(tmp_path), policy=Accounts())

    async def nothing(*_: Any) -> float:
        return 0.0

    monkeypatch.setattr(lead, "_carry_out", nothing)
    await lead.decide(0, 0, Last())
    assert lead.metrics == {}, "nothing is over yet"
    for step in (1, 2):
        requests = {"rollout": measurements.Requests()}
        await lead.decide(step, 0, Last(requests=requests, rollout_s=2.0 * step))
        assert lead.metrics["placement/told"] == step
    decisions, outcomes = run_files.read_placement(tmp_path)
    assert sorted(decisions) == [0, 1, 2]
    assert {step: outcome.waited for step, outcome in outcomes.items()} == {
        0: {0: 2.0},
        1: {0: 4.0},
    }


async def test_only_replicas_that_are_woken_count_as_moved() -> None:
    """Neither one that cannot sleep nor one that is lost is asked to wake."""

    class Answers:
        async def call(self, *_: Any, **__: Any) -> None:
            pass

    peers: dict[str, list[Any]] = {"judge": [Answers(), Answers()], "fixed": [Answers()]}
    sleepers = Sleepers(peers, able=["judge"], asleep_in_training=[])
    await sleepers.arrange({"judge": [], "fixed": []})
    sleepers.lost = {("judge", 1)}
    await sleepers.arrange({"judge": [0, 1], "fixed": [0]})
    assert sleepers.moved == 1


class Compiles:
    """A policy whose preparation takes 30 s by a clock of the test, and each decision 1 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []

    def prepare(self, window: Window) -> None:
        assert window.slots == {"rollout": 1}
        self.calls.append("prepare")
        self.now_s += 30

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        self.calls.append("revise")
        self.now_s += 1
        return place_evenly(partition, window)


async def test_what_a_policy_prepares_comes_before_its_first_decision_and_counts_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Compiles()
    lead = mover({}, directory=str(tmp_path), policy=policy)
    monkeypatch.setattr(
        "gcore_core.controllers.placement.lead.time",
        SimpleNamespace(perf_counter=lambda: policy.now_s),
    )

    async def nothing(*_: Any) -> float:
        return 0.0

    monkeypatch.setattr(lead, "_carry_out", nothing)
    for step in range(2):
        await lead.decide(step, 0, Last())
    assert policy.calls == ["prepare", "revise", "revise"]
    lines = (tmp_path / "placement.jsonl").read_text().splitlines()
    assert [json.loads(line)["took_s"] for line in lines] == [1.0, 1.0]


def test_a_policy_that_cannot_prepare_is_named() -> None:
    policy = SimpleNamespace(prepare=lambda window: 1 / 0, revise=None)
    with pytest.raises(ContractError, match=r"placement.*some/policy.*ZeroDivisionError"):
        prepare_policy(policy, "some/policy", Window(devices=(), slots={}))
