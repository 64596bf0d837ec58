"""Machines that come while a run goes on get generators, and nothing begins again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import SHELL, Machine, machines
from tests.support.node_runs import (
    ENVIRONMENT,
    PATIENCE_S,
    Watched,
    alone,
    hash_of,
    left_on,
    wait_until,
    watched,
)

STEPS = 160
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
        output = run.ends(400)
        drawn = drawn_by(run)
    assert "goes on from step" not in output
    assert {"rollout.2", "rollout.3"} <= drawn.keys()
    wait_until(lambda: not second.processes())
    assert left_on(first) == left_on(second) == []
    assert hash_of(output) == alone(tmp_path / "alone", "cluster.devices=4", *JOB)


@pytest.mark.slow
def test_a_node_joins_a_run_that_goes_on_and_another_takes_its_place(
    three: tuple[Machine, Machine, Machine], tmp_path: Path
) -> None:
    """The run begins with one of two nodes. The second joins, is lost, and a third one joins."""
    first, second, third = three
    token = tmp_path / "token"
    token.write_text("the token of this run, long enough")
    words = [sys.executable, "-m", "gcore_core", "nodes", "join", f"{first.address}:29399"]
    command = [*words, f"--token-file={token}", "--again=2"]
    launcher = [
        "launcher.use=nodes/join",
        "launcher.config.hosts=2",
        "launcher.config.min_hosts=1",
        f"launcher.config.token_file={token}",
        "launcher.config.devices=2",
        f"launcher.config.patience_s={PATIENCE_S}",
    ]
    joined = [first.start(command, env=ENVIRONMENT)]
    with watched(first, tmp_path / "grown", *launcher, *JOB) as run:
        run.step(after=1)
        joined.append(second.start(command, env=ENVIRONMENT))
        run.line(r"node2 has come with rollout\.2, rollout\.3; it draws from step \d+ on")
        run.step(after=run.step())
        second.power_off()
        run.line(r"node2 is lost with rollout\.2, rollout\.3; the step goes on without it")
        joined.append(third.start(command, env=ENVIRONMENT))
        run.line(r"node3 has come with rollout\.4, rollout\.5; it draws from step \d+ on")
        output = run.ends(400)
        drawn = drawn_by(run)
    assert "goes on from step" not in output
    assert {f"rollout.{number}" for number in range(6)} == drawn.keys()
    assert [process.wait(60) for process in (joined[0], joined[2])] == [0, 0]
    joined[1].wait(60)
    assert left_on(first) == left_on(third) == []
    assert hash_of(output) == alone(tmp_path / "alone", "cluster.devices=4", *JOB)
