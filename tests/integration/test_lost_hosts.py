"""A run on several machines goes on when one of them is lost, and takes it back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import Machine, machines
from tests.support.node_runs import alone, hash_of, left_on, on, wait_until, watched

STEPS = 24
SAVED = ("checkpoint.every=1", f"run.steps={STEPS}")


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    with machines(2) as (first, second):
        yield first, second


@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_host_and_takes_it_back(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """Its weights are those of a run that nothing has disturbed, bit for bit."""
    first, second = two
    with watched(first, tmp_path / "lost", *on(two), *SAVED) as run:
        run.step(after=1)
        second.link_down()
        run.line(r"10\.77\.0\.2 is missing, the run goes on without it: .*connect to host 10\.77")
        run.line("slots: policy 1 of 1, rollout 1 of 1")
        wait_until(lambda: not left_on(second))
        second.link_up()
        run.step(after=run.step())
        first.run(["kill", "-KILL", run.pid("agent.0", "policy.0")])
        run.line(r"10\.77\.0\.2 is there again")
        output = run.ends()
        log = (run.run / "logs" / "agent.1.log").read_text()
    assert len(re.findall(r"rollout\.0 is started", log)) == 2
    assert left_on(first) == left_on(second) == []
    assert hash_of(output) == alone(tmp_path / "alone", *SAVED)


@pytest.mark.slow
def test_a_run_on_several_hosts_outlives_its_supervisor(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """All agents end with the supervisor. The next one starts others, and goes on from the newest
    checkpoint to the same weights.
    """
    first, second = two
    with watched(first, tmp_path / "killed", *on(two), *SAVED) as run:
        run.step(after=1)
        supervisor = max(map(int, first.run(["pgrep", "-f", "gcore_core run"]).stdout.split()))
        first.run(["kill", "-KILL", str(supervisor)])
        run.line("the supervisor ended with signal SIGKILL; it is started again")
        output = run.ends()
        log = (run.run / "logs" / "agent.1.log").read_text()
    assert len(re.findall(r"rollout\.0 is started", log)) == 2
    assert left_on(first) == left_on(second) == []
    assert hash_of(output) == alone(tmp_path / "alone", *SAVED)
