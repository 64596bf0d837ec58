"""What a node agent tells of its workers' ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gcore_core import __version__
from gcore_core.contract.errors import WorkerError
from gcore_core.contract.job_settings import RunSettings
from gcore_core.node import agent as agent_module
from gcore_core.node.agent import Agent, AgentSpec, end_hung
from gcore_core.node.launchers import dismiss
from gcore_core.node.spawn import environment_of
from gcore_core.runtime.messages import (
    Nothing,
    SpawnRequest,
    StorePlace,
    Versions,
    WorkerSpec,
)
from gcore_core.runtime.worker_settings import ScorerSettings
from gcore_core.store.server import StoreSpec
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call, Service
from gcore_core.workers.overruns import GRACE_S, Overruns, RewardWork, note_path


def make_agent(directory: Path) -> Agent:
    store = StoreSpec(
        node="agent.0", directory=str(directory / "store"), spill=str(directory / "spill")
    )
    spec = AgentSpec(
        name="agent.0", addresses={}, secret=b"s" * 32, store=store, meeting=str(directory)
    )
    agent = Agent(spec, InlineNetwork().view("agent.0"))
    agent.register(Service("agent.0"))
    return agent


def worker_of(python: Path, directory: Path) -> WorkerSpec:
    """A scorer with an interpreter of its own."""
    return WorkerSpec(
        role="scorer",
        rank=0,
        ranks=1,
        peers={},
        factories={},
        secret=b"s" * 32,
        settings=ScorerSettings(run=RunSettings(), rewards={}),
        store=StorePlace(str(directory), "agent.0", "agent.0"),
        versions=Versions(str(python), __version__, {}),
        python=str(python),
        log=str(directory / "scorer.0.log"),
        restarts=5,
    )


async def test_a_killed_worker_that_cannot_be_started_again_is_told_as_ended_for_good(
    tmp_path: Path,
) -> None:
    """Its interpreter is gone, or the machine has no room for one more process."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nrm "$0"\nkill -9 $$\n')
    python.chmod(0o700)
    agent = make_agent(tmp_path)
    call = Call(lambda: None)
    await agent.spawn(SpawnRequest([worker_of(python, tmp_path)]), call)
    async with asyncio.timeout(30), contextlib.aclosing(agent.exits(Nothing(), call)) as exits:
        killed = await anext(exits)
        ended = await anext(exits)
    assert (killed.code, killed.restarted) == (-9, True)
    assert (ended.name, ended.pid, ended.restarted) == ("scorer.0", killed.pid, False)
    assert f"{python} cannot be started: No such file or directory" in ended.tail


async def test_a_worker_that_is_ended_at_the_end_is_not_started_again(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o700)
    agent = make_agent(tmp_path)
    call = Call(lambda: None)
    await agent.spawn(SpawnRequest([worker_of(python, tmp_path)]), call)
    await agent.end_workers()
    async with asyncio.timeout(30), contextlib.aclosing(agent.exits(Nothing(), call)) as exits:
        ended = await anext(exits)
    assert (ended.name, ended.code, ended.restarted) == ("scorer.0", -signal.SIGTERM, False)


async def test_a_scorer_that_a_reward_holds_is_ended_and_not_while_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has stopped it holds it then; the reward does not."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntrap "" USR1\nrm "$0"\nexec sleep 600\n')
    python.chmod(0o700)
    stopped = [True] * 3
    monkeypatch.setattr(agent_module, "_HOLD_LOOK_S", 0.01)
    monkeypatch.setattr(agent_module, "_is_stopped", lambda pid: bool(stopped) and stopped.pop())
    agent = make_agent(tmp_path)
    await agent.spawn(SpawnRequest([worker_of(python, tmp_path)]), Call(lambda: None))
    while python.exists():
        await asyncio.sleep(0.01)
    work = [RewardWork("slow", "train", 4, 0, 0)]
    with Overruns(note_path(str(tmp_path), "scorer.0")).watch(work, -GRACE_S):
        async with (
            asyncio.timeout(30),
            contextlib.aclosing(agent.exits(Nothing(), Call(lambda: None))) as exits,
        ):
            ended = await anext(exits)
    assert stopped == []
    assert (ended.code, ended.restarted) == (-signal.SIGKILL, True)
    assert ended.running.startswith("rewards.slow held the process for longer than")
    assert agent._held == set(), "a later process may get the same number"
    await agent.stop(1.0)


@pytest.fixture
def reaped_by_the_loop() -> Iterator[None]:
    """Has the event loop itself wait for processes, as newer versions of Python do by default.

    Otherwise a thread does, and it depends on chance who is first to wait for one that has ended.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    before = asyncio.get_child_watcher()
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    yield
    asyncio.set_child_watcher(before)


@pytest.mark.usefixtures("reaped_by_the_loop")
@pytest.mark.parametrize("end", [end_hung, dismiss])
async def test_a_process_that_ends_before_it_is_signalled_keeps_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[Process], Awaitable[None] | None]
) -> None:
    """Nobody has waited for it yet. It is told as what it is: such as killed, and started again."""
    monkeypatch.setattr(agent_module, "_STACKS_S", 0.0)
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", "read line; kill -9 $$", stdin=reading, start_new_session=True
    )
    os.close(writing)
    os.close(reading)
    # The event loop does not run from here on, so nobody else waits for it.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    ending = end(process)
    if ending is not None:
        await ending
    assert await process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("full", ["log", "spec"])
async def test_a_file_of_a_worker_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Not its interpreter, which has nothing to do with it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o700)
    spec = worker_of(python, tmp_path)
    if full == "log":
        named = spec.log
        Path(named).mkdir()
        cause = "Is a directory"
    else:
        named = str(tmp_path)
        monkeypatch.setattr(tempfile, "tempdir", named)
        monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "wb+"))
        cause = "No space left on device"
    with pytest.raises(WorkerError) as error:
        await agent_module._spawn_worker(spec)
    assert error.value.what == f"{named} cannot be written: {cause}."
    assert error.value.where == "scorer.0" and error.value.todo


def test_threads_wait_as_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert environment_of(sys.executable)["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert environment_of(sys.executable)["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in environment_of(sys.executable)
