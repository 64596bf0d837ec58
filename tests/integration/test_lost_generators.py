"""A step goes on when a machine is lost that has nothing but generators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.machines import Machine, machines
from tests.support.node_runs import Watched, alone, hash_of, left_on, on, wait_until, watched

STEPS = 12
#: The first host has the trainer, a replica and a scorer, the second two replicas and a scorer.
JOB = (
    f"run.steps={STEPS}",
    "roles.rollout.slots=3",
    "rewards.exact.workers=2",
    "rewards.worked.workers=2",
    "checkpoint.every=0",
    "checkpoint.restarts=0",
)
LOST = r"10\.77\.0\.2 is lost with rollout\.1, rollout\.2, scorer\.1; the step goes on without it"


def _kill(second: Machine) -> None:
    """Kills the agent of a machine and all that is on it, at once."""
    second.run(["pkill", "-KILL", "-f", "gcore_core"], check=False)


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    with machines(2) as (first, second):
        yield first, second


def _lost_at(run: Watched) -> list[int]:
    rows = (run.run / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, rows) if row["metrics"].get("nodes/lost")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "disturb",
    [pytest.param(_kill, id="killed"), pytest.param(Machine.link_down, id="its link is cut")],
)
def test_a_step_goes_on_without_a_machine_of_generators(
    two: tuple[Machine, Machine], tmp_path: Path, disturb: Callable[[Machine], None]
) -> None:
    """Nothing begins again, and the weights are those of a run that nothing has disturbed."""
    first, second = two
    with watched(first, tmp_path / "lost", *on(two), "launcher.config.devices=2", *JOB) as run:
        run.step(after=3)
        disturb(second)
        run.line(LOST)
        output = run.ends()
        lost_at = _lost_at(run)
    assert "goes on from step" not in output
    assert lost_at and lost_at[-1] == STEPS
    wait_until(lambda: not second.processes())
    assert left_on(first) == []
    assert hash_of(output) == alone(tmp_path / "alone", "cluster.devices=4", *JOB)
