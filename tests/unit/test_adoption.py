"""Which agents of a lost supervisor are taken over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from gcore_core.runtime.process import adoption
from gcore_core.runtime.process.adoption import AdoptedProcess, KeptAgent, keep, kept_by
from gcore_core.runtime.process.leftovers import StartedProcess, identify_process
from gcore_core.runtime.process.spawn import own_opening, signal_at_end
from gcore_core.runtime.store.server import StoreSpec

NAMES = ["supervisor", "agent.0", "rollout.0"]


class Memory:
    """A guard that remembers."""

    lifeline = -1

    def __init__(self) -> None:
        self.facts = b""

    def remember(self, facts: bytes) -> None:
        self.facts = facts

    def remembered(self) -> bytes:
        return self.facts


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def agent(process: StartedProcess | None) -> KeptAgent:
    assert process is not None
    return KeptAgent(
        process=process,
        meeting="/tmp/g-core-x",
        addresses={name: f"unix:/tmp/g-core-x/{name}" for name in NAMES},
        secret=b"s" * 32,
        store=StoreSpec(node="agent.0", directory="/dev/shm/g-core-x", spill="/tmp/spill"),
    )


def test_a_living_agent_of_the_same_processes_is_remembered(
    process: subprocess.Popen[bytes],
) -> None:
    guard = Memory()
    assert kept_by(guard, NAMES) is None
    keep(guard, agent(identify_process(process.pid)))
    assert kept_by(guard, reversed(NAMES)) == agent(identify_process(process.pid))
    assert kept_by(guard, [*NAMES, "rollout.1"]) is None, "it has no address there"


def test_an_agent_that_has_ended_or_whose_pid_is_another_process_is_not_taken_over(
    process: subprocess.Popen[bytes],
) -> None:
    guard = Memory()
    living = identify_process(process.pid)
    assert living is not None
    other = StartedProcess(living.pid, living.start_ticks - 1)
    keep(guard, agent(other))
    assert kept_by(guard, NAMES) is None
    with pytest.raises(ProcessLookupError):
        AdoptedProcess(other)
    keep(guard, agent(living))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert kept_by(guard, NAMES) is None


def test_half_of_what_was_to_be_remembered_is_nothing(process: subprocess.Popen[bytes]) -> None:
    """The supervisor was killed as it wrote."""
    guard = Memory()
    keep(guard, agent(identify_process(process.pid)))
    for length in range(len(guard.facts)):
        half = Memory()
        half.remember(guard.facts[:length])
        assert kept_by(half, NAMES) is None
    garbled = Memory()
    garbled.remember(msgspec.msgpack.encode({"process": 1}))
    assert kept_by(garbled, NAMES) is None


async def test_the_end_of_an_adopted_process_is_waited_for(
    process: subprocess.Popen[bytes],
) -> None:
    living = identify_process(process.pid)
    assert living is not None
    adopted = AdoptedProcess(living)
    waiting = asyncio.ensure_future(adopted.wait())
    adoption.dismiss(adopted)
    async with asyncio.timeout(30):
        await waiting
    assert process.wait() == -signal.SIGTERM
    adoption.dismiss(adopted)  # of one that has ended: nothing happens
    adopted.close()


def test_every_opening_of_a_lifeline_tells_a_process_of_its_own() -> None:
    """A second agent must not take the signal at the end away from the first."""
    reading, alive = os.pipe()
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    processes = []
    for _ in range(2):
        with own_opening(reading) as own:
            process = subprocess.Popen(command, pass_fds=[own], start_new_session=True)
            signal_at_end(own, process.pid, signal.SIGKILL)
            processes.append(process)
    os.close(alive)
    assert [process.wait(30) for process in processes] == [-signal.SIGKILL] * 2
    os.close(reading)
