"""``nodes/join`` on two machines that have nothing in common but files, a network and a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_nodes.config import JoinConfig
from gcore_nodes.join_launcher import JoinLauncher
from gcore_nodes.messages import LEAVING
from gcore_testing.contracts.launcher import LauncherContract

from gcore_core.contract.errors import WorkerDied, WorkerError
from gcore_core.contract.launching import Site
from gcore_core.runtime.messages import EXITS, USAGE, Nothing
from tests.integration.test_nodes import (
    LONG_S,
    PATIENCE_S,
    agents_on,
    hash_of,
    left_on,
    run_words,
    visit,
    wait_until,
)
from tests.support.machines import Machine, assert_in_no_process, machines

TOKEN = "the token of this run, long enough"
HOME = "10.77.0.1:29399"
Joined = subprocess.Popen[str]


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    """Two machines. This process is on the first one's network, so the first one is home."""
    with machines(2) as (first, second), first.network():
        yield first, second


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return file


def launcher(token: Path, hosts: Any = 2, **settings: Any) -> JoinLauncher:
    changed = {"devices": 1, "patience_s": PATIENCE_S, "wait_s": LONG_S, **settings}
    return JoinLauncher(JoinConfig(hosts=hosts, token_file=str(token), **changed))


def join_words(token: Path, *options: str) -> list[str]:
    words = [sys.executable, "-m", "gcore_core", "nodes", "join", HOME, f"--token-file={token}"]
    return [*words, "--again=2", *options]


@contextlib.contextmanager
def joining(token: Path, *machines: Machine, options: Any = ()) -> Iterator[list[Joined]]:
    """Starts the join command on machines; ends what is left of it."""
    started = [
        machine.start(
            join_words(token, *options),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for machine in machines
    ]
    try:
        yield started
    finally:
        for machine, process in zip(machines, started, strict=True):
            machine.run(["pkill", "-TERM", "-f", "gcore_core nodes join"], check=False)
            process.communicate(timeout=LONG_S)


# The same contract holds nodes/command for every change (test_nodes.py), by the same site.
@pytest.mark.slow
class TestTwoNodes(LauncherContract):
    @pytest.fixture
    def launcher(self, two: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Any]:
        token = tmp_path / "token"
        token.write_text(TOKEN)

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            """Nodes join again after each site, as a scheduler that starts them again has them."""
            words = f"while :; do {' '.join(join_words(token))}; sleep 0.1; done"
            loops = [
                machine.start(["sh", "-c", words], stderr=subprocess.DEVNULL) for machine in two
            ]
            yield
            for loop in loops:
                loop.kill()
                loop.wait()

        with again():
            yield launcher(token)


def test_what_is_secret_is_in_no_argument_environment_or_log(
    two: tuple[Machine, Machine], token: Path, logs: Path
) -> None:
    key = b""

    async def look(site: Site) -> None:
        nonlocal key
        key = next(line for line in site.identity.splitlines() if b"-----" not in line)
        n_looked_at = assert_in_no_process(
            [site.secret, site.secret.hex().encode(), key, TOKEN.encode()],
            b"gcore_nodes.agent",
            b"nodes\0join",
        )
        assert n_looked_at >= 4, "two agents and two commands were not looked at"

    with joining(token, *two) as started:
        visit(launcher(token), logs, look)
        said = "".join(process.communicate(timeout=LONG_S)[1] for process in started)
    assert key
    assert TOKEN not in said and key.decode() not in said
    for path in logs.rglob("*"):
        assert key not in path.read_bytes(), path


def test_a_run_that_ends_well_ends_the_commands_with_0(
    two: tuple[Machine, Machine], token: Path, logs: Path
) -> None:
    """Also that of home, which starts no agent. Nothing is left; the agent's log is at home."""

    async def look(site: Site) -> None:
        assert sorted(site.nodes) == ["agent.0", "agent.1"] and site.home == "agent.0"
        assert site.views["agent.1"]["supervisor"].startswith("tls:10.77.0.1:")
        assert site.views["agent.0"]["agent.1"].startswith("tls:10.77.0.2:")
        assert len(agents_on(two[1])) == 1 and agents_on(two[0]) == []

    with joining(token, *two) as started:
        visit(launcher(token), logs, look)
        assert [process.wait(LONG_S) for process in started] == [0, 0]
    assert left_on(two[1]) == []
    assert "agent.1 INFO the lease is held" in (logs / "agent.1.log").read_text()


def test_nodes_may_come_before_home_and_home_need_not_be_one(
    two: tuple[Machine, Machine], token: Path, logs: Path
) -> None:
    async def look(site: Site) -> None:
        assert site.home == "agent.1"
        await site.nodes["agent.0"].agent.call(USAGE, Nothing(), deadline_s=LONG_S)

    with joining(token, two[1], options=["--name=here"]) as (process,):
        assert process.stderr is not None
        assert "waiting for 10.77.0.1:29399" in process.stderr.readline()
        visit(launcher(token, ["here"]), logs, look)
        assert process.wait(LONG_S) == 0


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        pytest.param(KeyError("on purpose"), 5, "'on purpose'", id="for good"),
        pytest.param(
            WorkerError("lost", where="it"),
            5,
            "it: lost",
            id="it might have gone on",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_ends_with_an_error_ends_the_commands_so(
    two: tuple[Machine, Machine], token: Path, logs: Path, error: Exception, code: int, said: str
) -> None:
    async def look(site: Site) -> None:
        raise error

    with joining(token, *two) as started:
        with pytest.raises(type(error)):
            visit(launcher(token), logs, look)
        for process in started:
            told = process.communicate(timeout=LONG_S)[1]
            assert process.returncode == code, told
            assert "the run ended with an error" in told and said in told, told
    assert left_on(two[1]) == []


def test_a_run_that_opens_another_site_gets_the_same_nodes(
    two: tuple[Machine, Machine], token: Path, logs: Path
) -> None:
    """As one does that goes on from a checkpoint after it has lost a process."""

    async def fail(site: Site) -> None:
        raise WorkerError("a trainer is lost")

    async def look(site: Site) -> None:
        await site.nodes["agent.1"].agent.call(USAGE, Nothing(), deadline_s=LONG_S)

    with joining(token, *two, options=["--again=60"]) as started:
        with pytest.raises(WorkerError):
            visit(launcher(token), logs, fail)
        visit(launcher(token), logs, look)
        assert [process.wait(LONG_S) for process in started] == [0, 0]


def test_another_token_is_refused_by_the_command(
    two: tuple[Machine, Machine], token: Path, tmp_path: Path, capfd: Any
) -> None:
    """And home goes on waiting for those that know it."""
    other = tmp_path / "other"
    other.write_text("another token, which is long enough")

    async def counted() -> int:
        asking = asyncio.ensure_future(launcher(token).nodes("auto"))
        words = join_words(other)
        refused = await asyncio.to_thread(two[1].run, words, check=False)
        assert refused.returncode == 2, refused.stderr
        assert "its token is not the one of the run" in refused.stderr
        with joining(token, *two):
            return len(await asking)

    assert asyncio.run(counted()) == 2
    assert "10.77.0.2 is refused: it does not know the token" in capfd.readouterr().err


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(Machine.link_down, id="both"),
        pytest.param(Machine.deafen, id="one way", marks=pytest.mark.slow),
    ],
)
def test_a_cut_link_ends_the_agent_and_the_command(
    two: tuple[Machine, Machine], token: Path, logs: Path, cut: Callable[[Machine], None]
) -> None:
    async def look(site: Site) -> None:
        agent = site.nodes["agent.1"].agent
        await agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        cut(two[1])
        with pytest.raises(WorkerDied, match="gone"):
            async for _ in agent.stream(EXITS, Nothing()):
                pass
        await asyncio.to_thread(wait_until, lambda: not agents_on(two[1]))

    with joining(token, *two) as (_, process):
        visit(launcher(token), logs, look)
        told = process.communicate(timeout=LONG_S)[1]
        assert process.returncode == 5, told
        assert "home is gone" in told
    assert left_on(two[1]) == []


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGTERM, id="asked", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_ended_ends_its_agent(
    two: tuple[Machine, Machine], token: Path, logs: Path, number: int
) -> None:
    async def look(site: Site) -> None:
        agent = site.nodes["agent.1"].agent
        await agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        end = ["pkill", f"-{number}", "-f", "gcore_core nodes join"]
        if number == signal.SIGTERM:  # the first asks to leave the run, and nobody answers here
            two[1].run(end)
            async for _ in agent.stream(LEAVING, Nothing()):
                break
        two[1].run(end)
        with pytest.raises(WorkerDied, match="gone"):
            async for _ in agent.stream(EXITS, Nothing()):
                pass
        await asyncio.to_thread(wait_until, lambda: not agents_on(two[1]))

    with joining(token, *two) as (_, process):
        # a machine may ask to leave only where a run goes on with fewer
        visit(launcher(token, min_hosts=2), logs, look)
        code = process.wait(LONG_S)
    # nsenter passes the end of its command on.
    assert code == (143 if number == signal.SIGTERM else -9)
    wait_until(lambda: not left_on(two[1]))  # what cleans up after the agent ends behind it


def test_a_stopped_agent_is_woken_to_end(
    two: tuple[Machine, Machine], token: Path, logs: Path
) -> None:
    async def look(site: Site) -> None:
        node = site.nodes["agent.1"]
        await node.agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        (pid,) = two[1].run(["pgrep", "-f", "gcore_nodes.agent"]).stdout.split()
        two[1].run(["kill", "-STOP", pid])
        assert node.end_agent is not None
        await node.end_agent()
        await asyncio.to_thread(wait_until, lambda: not agents_on(two[1]))

    with joining(token, *two):
        visit(launcher(token), logs, look)
    assert left_on(two[1]) == []


@pytest.mark.slow
def test_the_quickstart_learns_the_same_with_nodes_that_join(
    two: tuple[Machine, Machine], token: Path, tmp_path: Path
) -> None:
    """Bit for bit as on one machine. A command may be started before the run or after it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first, second = two
    words = run_words(
        *("launcher.use=nodes/join", "launcher.config.hosts=2", "launcher.config.devices=1"),
        f"launcher.config.token_file={token}",
    )
    with joining(token, first, second) as started:
        done = first.run(words, cwd=tmp_path, env=environment, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [process.wait(LONG_S) for process in started] == [0, 0]
    assert left_on(first) == left_on(second) == []
    alone = subprocess.run(
        run_words("cluster.devices=2"),
        cwd=tmp_path,
        env=environment,
        timeout=400,
        check=True,
        capture_output=True,
        text=True,
    )
    assert hash_of(done.stdout) == hash_of(alone.stdout)


@pytest.mark.slow
def test_a_killed_supervisor_leaves_nothing_and_its_nodes_say_so(
    two: tuple[Machine, Machine], token: Path, tmp_path: Path
) -> None:
    first, second = two
    words = run_words(
        *("launcher.use=nodes/join", "launcher.config.hosts=2", "launcher.config.devices=1"),
        *(f"launcher.config.token_file={token}", "run.steps=1000"),
    )
    with joining(token, *two) as started:
        run = first.start(
            words,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert run.stdout is not None
        for line in run.stdout:
            if "  reward " in line:  # a step has ended
                break
        first.run(["pkill", "-KILL", "-f", "gcore_core run"])
        for process in started:
            told = process.communicate(timeout=LONG_S)[1]
            assert process.returncode == 5 and "home is gone" in told, told
        run.communicate()
        wait_until(lambda: not left_on(first) and not left_on(second))


def wait_for_line(process: Joined, text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"it has ended without: {text}")


@pytest.mark.slow
def test_another_node_takes_the_place_of_a_lost_one(token: Path, logs: Path) -> None:
    """One node more than a run needs waits until it is needed."""

    async def lose(site: Site) -> None:
        spare.extend(stack.enter_context(joining(token, third, options=["--again=60"])))
        agent = site.nodes["agent.1"].agent
        await agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        await asyncio.to_thread(wait_for_line, spare[0], "all nodes of the run have joined")
        second.power_off()
        with pytest.raises(WorkerDied, match="gone"):
            async for _ in agent.stream(EXITS, Nothing()):
                pass
        raise WorkerError("a node is lost")

    async def look(site: Site) -> None:
        await site.nodes["agent.1"].agent.call(USAGE, Nothing(), deadline_s=LONG_S)
        assert site.views["agent.0"]["agent.1"].startswith("tls:10.77.0.3:")

    spare: list[Joined] = []
    with machines(3) as (first, second, third), first.network(), contextlib.ExitStack() as stack:
        stack.enter_context(joining(token, first, options=["--again=60"]))
        lost = second.start(join_words(token), stderr=subprocess.DEVNULL)
        with pytest.raises(WorkerError, match="a node is lost"):
            visit(launcher(token), logs, lose)
        visit(launcher(token), logs, look)
        assert spare[0].wait(LONG_S) == 0
        lost.wait(LONG_S)
