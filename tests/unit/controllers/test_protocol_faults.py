"""Processes killed at any message, and every other fault: the run ends as the calm one does."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from gcore_testing.faults import FAULTS, Faults
from gcore_testing.simulation import Outcome, SimulatedJob, run_virtual, simulate, violations

JOB = SimulatedJob(
    replicas=3,
    ranks=2,
    judges=1,
    prompts=4,
    samples=2,
    evaluate_prompts=2,
    filter="gcore_core.builtin.filters:Varied",
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_virtual(
        simulate(replace(JOB, shards=1, replicas=1), tmp_path_factory.mktemp("calm") / "store")
    )


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.rest) for block in (1, 2, 3))]
)
def test_kills_and_lost_messages_change_nothing(block: int, calm: Outcome, tmp_path: Path) -> None:
    hit = set()
    for seed in range(20_000 + block * 20, 20_000 + block * 20 + 20):
        weather, job = Faults(seed), replace(JOB, takes_stale=bool(seed % 2))
        found = run_virtual(simulate(job, tmp_path / str(seed), weather))
        assert not violations(found, calm, weather, job), f"seed {seed}"
        hit |= {fault for _, _, fault in weather.hits}
    assert hit == set(FAULTS)


PLANTING = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "protocol_mutants.py"))


@pytest.mark.parametrize("bug", PLANTING["MUTANTS"])
def test_every_planted_bug_finds_its_lines_in_the_code(bug: str) -> None:
    """Else the benchmark that hunts them fails after minutes."""
    owner, function, _, _ = PLANTING["MUTANTS"][bug]
    original = owner.__dict__[function]
    with PLANTING["planted"](bug):
        assert owner.__dict__[function] is not original
    assert owner.__dict__[function] is original
