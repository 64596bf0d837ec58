"""What a step costs in virtual time is no more than it was, and what it trains on is the same.

The synchronous program, and the asynchronous one with nothing ahead.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gcore_testing.faults import Faults
from gcore_testing.simulation import Outcome, SimulatedJob, run_virtual, simulate

from gcore_core.contract.factories import FactorySpec

pytest.importorskip("gcore_async")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
YARDSTICK = BENCHMARKS / "releases" / "0.2-core.json"
#: Nothing may be above so many times what it was.
MOST = 1.02
KNOWN = {
    name.removeprefix("house.cost_"): entry["value"]
    for name, entry in json.loads(YARDSTICK.read_text())["figures"].items()
    if name.startswith("house.cost_")
}
PROGRAMS = ("sync", "async")
RATES = (0.3, 0.6, 1.0)


@pytest.fixture(scope="module")
def costs() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("step_costs")


@pytest.mark.parametrize("name", sorted({name.partition("_s_")[2] for name in KNOWN} - {""}))
def test_a_step_takes_no_longer_issues_no_more_and_sends_no_more_than_it_did(
    name: str, costs: ModuleType
) -> None:
    """Virtual time: no machine changes it. Each figure is of the same seeds as the known one."""
    measured = costs.measure_costs(lambda case: case == name)
    assert len(measured) == 4
    above = {
        what: (value, KNOWN[what]) for what, value in measured.items() if value > MOST * KNOWN[what]
    }
    assert not above


def test_every_case_has_known_costs(costs: ModuleType) -> None:
    known = {what.partition("_s_")[2] for what in KNOWN} - {""}
    assert known == costs.cases().keys()


def case_of(costs: ModuleType, program: str, rate: float = 0.6, **changes: Any) -> Any:
    """A case of a small job that draws surplus again and drops a share of its groups."""
    job = replace(
        costs.JOB, steps=3, prompts=4, max_new_tokens=8, late_end=1, filter=costs.FILTERS[rate]
    )
    return costs.Case(job=replace(job, **changes), program=program)


def trained(outcome: Outcome) -> tuple[Any, ...]:
    """Everything of a run that shards, weather and kills must not change."""
    digests = [report.digests for report in outcome.reports]
    return outcome.batches, outcome.logits, outcome.ledger, digests


@pytest.fixture(scope="module")
def calm(costs: ModuleType) -> dict[tuple[float, int], Outcome]:
    """(keep rate, seed) -> the synchronous run on one shard and one generator, undisturbed."""
    return {
        (rate, seed): costs.run_case(case_of(costs, "sync", rate, shards=1, replicas=1), seed)
        for rate in RATES
        for seed in range(2)
    }


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_redrawn_surplus_consumes_the_same_ordinals_on_any_shards_in_any_weather(
    program: str, rate: float, costs: ModuleType, calm: dict[tuple[float, int], Outcome]
) -> None:
    """Messages are lost, late and doubled, and generators and scorers killed."""
    surplus = 0.0
    for seed in range(2):
        expected = calm[rate, seed]
        for shards in (1, 2, 4):
            case = case_of(costs, program, rate, shards=shards)
            found = costs.run_case(case, seed, Faults(100 * seed + shards, kills=0.005))
            assert trained(found) == trained(expected), f"seed {seed}, {shards} shards"
            surplus += sum(step.metrics.get("groups/surplus", 0) for step in found.reports[1:])
    if program == "sync" and rate < 1:
        assert surplus > 0, "nothing was drawn again: this tests nothing"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_deterministic_run_has_the_bits_of_the_other_program(
    program: str, costs: ModuleType, calm: dict[tuple[float, int], Outcome]
) -> None:
    for rate in RATES:
        case = case_of(costs, program, rate, deterministic=True)
        found = costs.run_case(case, 0, Faults(7))
        assert trained(found) == trained(calm[rate, 0]), f"keep rate {rate}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_kill_changes_nothing_in_what_is_trained(
    program: str, costs: ModuleType, calm: dict[tuple[float, int], Outcome]
) -> None:
    for killed_at in (1, 5, 20):
        case = replace(case_of(costs, program), killed_at=killed_at)
        weather = costs.Even(killed_at)
        assert trained(costs.run_case(case, 0, weather)) == trained(calm[0.6, 0])
        assert sum(weather.hits.values()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"rests": True},
        {"placement": FactorySpec("gcore_testing.fake_judge:InTurns")},
        {"rests": True, "placement": FactorySpec("gcore_testing.fake_judge:InTurns")},
    ],
    ids=["sleeping", "in turns", "both"],
)
def test_generators_that_sleep_or_take_turns_change_nothing_in_what_is_trained(
    changes: dict[str, Any], costs: ModuleType
) -> None:
    still = costs.run_case(case_of(costs, "sync", judges=3, shards=1), 0)
    for shards in (1, 4):
        case = case_of(costs, "sync", judges=3, shards=shards, **changes)
        found = costs.run_case(case, 0, Faults(shards, kills=0.0))
        assert trained(found) == trained(still), f"{shards} shards"


@pytest.mark.parametrize("first", PROGRAMS)
@pytest.mark.parametrize("then", PROGRAMS)
def test_a_run_that_is_resumed_at_another_size_trains_as_one_that_goes_on(
    first: str, then: str, costs: ModuleType, tmp_path: Path
) -> None:
    """Also under the other program."""

    def run(program: str, store: Path, **changes: Any) -> Outcome:
        case = case_of(costs, program, checkpoint_every=1, **changes)
        job: SimulatedJob = case.job
        return run_virtual(simulate(job, store, costs.Even(), costs.program_of(case)))

    whole = run(first, tmp_path / "whole", shards=2)
    before = run(first, tmp_path / "before", shards=2, stop_after=1)
    saved = before.checkpoints[-1]
    assert saved.step < len(whole.batches)
    (tmp_path / f"before-step{saved.step}").rename(tmp_path / f"after-step{saved.step}")
    after = run(then, tmp_path / "after", shards=4, replicas=2, resumed=saved)
    assert before.batches + after.batches == whole.batches
    assert after.logits == whole.logits
    assert after.ledger == whole.ledger
