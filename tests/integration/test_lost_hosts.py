"""A run on several machines goes on when one of them is lost, and takes it back."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcore_nodes.command_launcher import CommandLauncher
from gcore_nodes.config import CommandConfig

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.launching import FoundNodes
from tests.support.machines import SHELL, Machine, machines
from tests.support.node_runs import alone, hash_of, left_on, on, wait_until, watched

STEPS = 24
SAVED = ("checkpoint.every=1", f"run.steps={STEPS}")


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    with machines(2) as (first, second):
        yield first, second


def test_a_host_that_is_cut_off_is_missing_only_where_that_is_allowed(
    two: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """A run that begins needs all, unless the job says how many will do; one that goes on does not.
    Devices that nobody has any more are asked for in vain.
    """
    hosts = [machine.address for machine in two]

    def found(least: int | None, *, again: bool) -> FoundNodes:
        config = CommandConfig(hosts=hosts, command=f"{SHELL} {{host}}", devices=2, min_hosts=least)
        return asyncio.run(CommandLauncher(config).find_nodes(4, again=again))

    with two[0].network():
        whole = found(None, again=False)
        two[1].link_down()
        with pytest.raises(ConfigError, match=r"10\.77\.0\.2 cannot be used"):
            found(None, again=False)
        with pytest.raises(ConfigError, match=r"10\.77\.0\.2 cannot be used"):
            found(2, again=False)
        fewer = found(1, again=False)
        again = found(None, again=True)
        too_few = found(2, again=True)
    assert ([node.name for node in whole.nodes], whole.missing) == (["agent.0", "agent.1"], {})
    for one in (fewer, again, too_few):
        assert list(one.missing) == ["10.77.0.2"]
        assert "connect to host 10.77.0.2" in one.missing["10.77.0.2"]
        assert [(node.name, len(node.devices)) for node in one.nodes] == [("agent.0", 2)]
    assert fewer.refusal == again.refusal == ""
    assert too_few.refusal == "1 of 2 hosts answer, and at least 2 must"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "slots"),
    [
        pytest.param((), "policy 1 of 1, rollout 1 of 1", id="with the generator"),
        pytest.param(
            ("roles.policy.slots=2", "roles.policy.least=1", "roles.rollout.slots=2"),
            "policy 1 of 2, rollout 1 of 2",
            id="with a rank and a replica",
        ),
    ],
)
def test_a_run_goes_on_without_a_lost_host_and_takes_it_back(
    two: tuple[Machine, Machine], tmp_path: Path, roles: tuple[str, ...], slots: str
) -> None:
    """Its weights are those of a run that nothing has disturbed, bit for bit."""
    first, second = two
    private = "launcher.config.private=[10.77.0.0/24]"
    # Else the run may take the host back at a checkpoint, before its trainer is killed.
    grow = "cluster.grow=never"
    with watched(first, tmp_path / "lost", *on(two), *SAVED, *roles, private, grow) as run:
        run.step(after=1)
        second.link_down()
        run.line(r"10\.77\.0\.2 is missing, the run goes on without it: .*connect to host 10\.77")
        run.line(f"slots: {slots}")
        wait_until(lambda: not left_on(second))
        second.link_up()
        run.step(after=run.step())
        first.run(["kill", "-KILL", run.pid("agent.0", "policy.0")])
        run.line(r"10\.77\.0\.2 is there again")
        output = run.ends()
        log = (run.run / "logs" / "agent.1.log").read_text()
    assert len(re.findall(r"rollout\.\d is started", log)) == 2
    assert left_on(first) == left_on(second) == []
    assert hash_of(output) == alone(tmp_path / "alone", *SAVED, *roles)


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
