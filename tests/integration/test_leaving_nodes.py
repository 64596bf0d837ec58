"""Hosts with nothing but generators leave a run on purpose, and nothing begins again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import Machine, machines
from tests.support.node_runs import ENVIRONMENT, PATIENCE_S, alone, hash_of, left_on, watched

#: The first host has the trainer and a replica, the others have a replica each.
JOB = (
    "run.steps=50",
    "roles.rollout.slots=3",
    "roles.rollout.least=1",
    "checkpoint.every=0",
    "checkpoint.restarts=0",
)


@pytest.fixture
def three() -> Iterator[tuple[Machine, Machine, Machine]]:
    with machines(3) as (first, second, third):
        yield first, second, third


@pytest.mark.slow
def test_hosts_leave_by_sigterm_and_by_a_command_and_the_weights_are_those_of_a_calm_run(
    three: tuple[Machine, Machine, Machine], tmp_path: Path
) -> None:
    """What started them ends with exit code 0. The host of the trainer is refused."""
    first, second, third = three
    token = tmp_path / "token"
    token.write_text("the token of this run, long enough")
    words = [sys.executable, "-m", "gcore_core", "nodes"]
    command = [*words, "join", f"{first.address}:29399", f"--token-file={token}", "--again=2"]
    launcher = [
        "launcher.use=nodes/join",
        "launcher.config.hosts=3",
        f"launcher.config.token_file={token}",
        "launcher.config.devices=1",
        f"launcher.config.patience_s={PATIENCE_S}",
    ]
    joined = [machine.start(command, env=ENVIRONMENT) for machine in three]
    with watched(first, tmp_path / "left", *launcher, *JOB) as run:
        run.step(after=1)
        second.run(["pkill", "-TERM", "-f", "gcore_core nodes join"])
        run.line(r"node2 finishes what it has begun, and leaves then")
        run.line(r"node2 has left with rollout\.\d; nothing of it is drawn again")
        assert joined[1].wait(60) == 0
        answers = {
            host: first.run([*words, "drain", str(run.run), host], env=ENVIRONMENT, check=False)
            for host in ("node3", "node1")
        }
        run.line(r"node3 has left with rollout\.\d; nothing of it is drawn again")
        assert joined[2].wait(60) == 0
        output = run.ends(400)
        (last,) = [
            json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()[-1:]
        ]
    assert answers["node3"].returncode == 0, answers["node3"].stdout + answers["node3"].stderr
    assert answers["node1"].returncode == 2
    assert "node1 does not leave: g-core run is there" in answers["node1"].stdout
    assert last["metrics"]["nodes/left"] == 2.0 and "nodes/lost" not in last["metrics"]
    assert "goes on from step" not in output and " is lost with " not in output
    assert joined[0].wait(60) == 0
    assert left_on(first) == left_on(second) == left_on(third) == []
    assert hash_of(output) == alone(tmp_path / "alone", "cluster.devices=3", *JOB)
