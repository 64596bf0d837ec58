"""A run that machines join or leave begins again at a checkpoint, and makes nothing twice."""

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

WORDS = [sys.executable, "-m", "gcore_core", "nodes"]


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    with machines(2) as (first, second):
        yield first, second


def job(steps: int) -> tuple[str, ...]:
    """The first host has the trainer and two replicas. There is room for two replicas more."""
    return (
        f"run.steps={steps}",
        "roles.rollout.slots=4",
        "roles.rollout.least=1",
        "checkpoint.restarts=0",
        "launcher.config.devices=2",
        f"launcher.config.patience_s={PATIENCE_S}",
    )


def drawn_by(run: Watched) -> set[str]:
    """Returns the replicas that have drawn records."""
    files = (run.run / "trace").glob("*.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {row["replica"] for row in rows if "replica" in row}


def steps_of(run: Watched) -> list[int]:
    rows = (run.run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["step"] for row in rows]


def calm(directory: Path, steps: int) -> str:
    """Returns the hash of a run that had one machine all the time."""
    local = [word for word in job(steps) if not word.startswith("launcher")]
    return alone(directory, "cluster.devices=4", "checkpoint.every=2", *local)


@pytest.mark.slow
def test_a_host_that_is_added_to_the_list_draws_from_the_next_checkpoint_on_until_it_is_drained(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """No attempt fails, no step is made twice, and the weights are those of a calm run."""
    first, second = two
    steps = 40
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{first.address}\n")
    launcher = [
        "launcher.use=nodes/command",
        f"launcher.config.hosts={hosts}",
        f"launcher.config.command={SHELL} {{host}}",
        "launcher.config.min_hosts=1",
    ]
    words = [*launcher, *job(steps), "checkpoint.every=2"]
    with watched(first, tmp_path / "grown", *words) as run:
        run.step(after=2)
        hosts.write_text(f"{first.address}\n{second.address}\n")
        run.line(r"10\.77\.0\.2 has come; the run takes it in at its next checkpoint")
        run.line(r"the run goes on from step \d+")
        run.step(after=run.step())
        assert drawn_by(run) == {f"rollout.{number}" for number in range(4)}
        drain = [*WORDS, "drain", str(run.run), second.address]
        drained = first.run(drain, env=ENVIRONMENT, check=False)
        refused = first.run([*drain[:-1], first.address], env=ENVIRONMENT, check=False)
        run.line(r"10\.77\.0\.2 leaves; the run goes on without it at its next checkpoint")
        run.line(r"10\.77\.0\.2 is missing, the run goes on without it: it has left")
        wait_until(lambda: not second.processes())
        output = run.ends(400)
        made = steps_of(run)
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert "10.77.0.2 has left" in drained.stdout
    assert refused.returncode == 2
    assert "does not leave: g-core run is there" in refused.stdout
    assert output.count("the run goes on from step") == 2
    assert made == list(range(steps + 1))
    assert left_on(first) == left_on(second) == []
    assert hash_of(output) == calm(tmp_path / "alone", steps)


@pytest.mark.slow
def test_a_node_joins_a_run_that_goes_on_and_leaves_it_by_sigterm(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """What started it ends with exit code 0. A checkpoint is made for its leaving."""
    first, second = two
    steps = 40
    token = tmp_path / "token"
    token.write_text("the token of this run, long enough")
    command = [*WORDS, "join", f"{first.address}:29399", f"--token-file={token}", "--again=20"]
    launcher = [
        "launcher.use=nodes/join",
        "launcher.config.hosts=2",
        "launcher.config.min_hosts=1",
        f"launcher.config.token_file={token}",
    ]
    joined = [first.start(command, env=ENVIRONMENT)]
    with watched(first, tmp_path / "grown", *launcher, *job(steps), "checkpoint.every=0") as run:
        run.step(after=1)
        joined.append(second.start(command, env=ENVIRONMENT))
        run.line(r"node2 has come; the run takes it in at its next checkpoint")
        (run.run / "save").touch()
        run.line(r"the run goes on from step \d+")
        run.step(after=run.step())
        second.run(["pkill", "-TERM", "-f", "gcore_core nodes join"])
        run.line(r"node2 leaves; the run goes on without it at its next checkpoint")
        run.line(r"the run goes on from step \d+")
        assert joined[1].wait(60) == 0
        output = run.ends(400)
        made = steps_of(run)
    assert made == list(range(steps + 1))
    assert joined[0].wait(60) == 0
    assert left_on(first) == left_on(second) == []
    assert hash_of(output) == calm(tmp_path / "alone", steps)
