"""Machines that come while a run goes on get generators, and nothing begins again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import SHELL, Machine, machines
from tests.support.node_runs import (
    PATIENCE_S,
    Watched,
    alone,
    hash_of,
    left_on,
    wait_until,
    watched,
)

STEPS = 120
#: The first host has the trainer and two replicas. There is room for two replicas more.
JOB = (
    f"run.steps={STEPS}",
    "roles.rollout.slots=4",
    "roles.rollout.least=1",
    "checkpoint.every=0",
    "checkpoint.restarts=0",
)


def _listed(file: Path) -> list[str]:
    return [
        "launcher.use=nodes/command",
        f"launcher.config.hosts={file}",
        f"launcher.config.command={SHELL} {{host}}",
        "launcher.config.devices=2",
        "launcher.config.min_hosts=1",
        f"launcher.config.patience_s={PATIENCE_S}",
    ]


@pytest.fixture
def three() -> Iterator[tuple[Machine, Machine, Machine]]:
    with machines(3) as (first, second, third):
        yield first, second, third


def drawn_by(run: Watched) -> dict[str, set[int]]:
    """Returns replica -> the steps of which it has drawn records."""
    steps: dict[str, set[int]] = {}
    for file in (run.run / "trace").glob("*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            if "replica" in row:
                steps.setdefault(row["replica"], set()).add(row["step"])
    return steps


@pytest.mark.slow
def test_a_host_that_is_added_to_the_list_draws_in_the_same_attempt(
    three: tuple[Machine, Machine, Machine], tmp_path: Path
) -> None:
    """Its weights are those of a run that had one machine all the time, bit for bit."""
    first, second, _ = three
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{first.address}\n")
    with watched(first, tmp_path / "grown", *_listed(hosts), *JOB) as run:
        run.step(after=2)
        hosts.write_text(f"{first.address}\n{second.address}\n")
        run.line(r"10\.77\.0\.2 has come with rollout\.2, rollout\.3; it draws from step \d+ on")
        output = run.ends()
        drawn = drawn_by(run)
    assert "goes on from step" not in output
    print(drawn)
    wait_until(lambda: not second.processes())
    assert left_on(first) == left_on(second) == []
    assert hash_of(output) == alone(tmp_path / "alone", "cluster.devices=4", *JOB)
