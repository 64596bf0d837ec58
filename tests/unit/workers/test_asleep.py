"""A generator that was lost while it slept makes its backend at its wake, and not before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gcore_testing import fake

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError
from gcore_core.contract.records import Header, Lease
from gcore_core.runtime.compute import ThreadCompute
from gcore_core.runtime.messages import (
    GENERATE,
    PUSH_HELD,
    SCORE_AGAIN,
    SLEEP,
    TRAIN,
    WAKE,
    GenerateRequest,
    Nothing,
    ScoreAgain,
    SleepRequest,
)
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call, Service
from gcore_core.workers.asleep import SleepingGenerator
from gcore_core.workers.generator import GeneratorShell
from gcore_core.workers.sleep_note import SleepNote, note_path
from tests.support.generator_shells import shell_around


class Process:
    """A process that takes the place of one that was lost asleep, and how often it made a backend.

    peer: calls it.
    """

    def __init__(self, shell: GeneratorShell, note: SleepNote) -> None:
        self.made = 0
        self._shell = shell
        self._service = Service("rollout.0")
        network = InlineNetwork()
        asleep = SleepingGenerator(self._make, ThreadCompute(), note, "rollout.0")
        asleep.register(self._service)
        network.services["rollout.0"] = self._service
        self.peer = network.view("controller.0").peer("rollout.0")

    def _make(self) -> GeneratorShell:
        self.made += 1
        return self._shell

    async def drawn(self, ordinal: int, step: int = 0) -> list[Header]:
        request = GenerateRequest(step, ordinal, 0, TRAIN, [Lease(ordinal, 0, 0, (0, 1))], least=0)
        headers: list[Header] = []
        async for part in self.peer.stream(GENERATE, request):
            headers += part
        return headers


async def lost_asleep(directory: Path) -> tuple[Process, SleepNote]:
    note = SleepNote(note_path(str(directory), "rollout.0"))
    note.leave()
    generator = fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
    return Process(await shell_around(generator, directory, note), note), note


def test_a_note_says_that_a_generator_sleeps_from_its_sleep_to_its_wake(tmp_path: Path) -> None:
    async def scenario() -> None:
        note = SleepNote(note_path(str(tmp_path), "rollout.0"))
        generator = fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
        shell = await shell_around(generator, tmp_path, note)
        call = Call(lambda: None)
        assert not note.says_asleep
        await shell.sleep(SleepRequest(), call)
        assert note.says_asleep
        await shell.sleep(SleepRequest(), call)
        assert note.says_asleep
        await shell.wake(Nothing(), call)
        assert not note.says_asleep

    asyncio.run(scenario())


def test_what_asks_nothing_of_its_engine_makes_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        process, note = await lost_asleep(tmp_path)
        await process.peer.call(SLEEP, SleepRequest(3))
        assert await process.peer.call(SCORE_AGAIN, ScoreAgain(0, [])) == []
        with pytest.raises(ContractError, match="this generator sleeps"):
            await process.peer.call(PUSH_HELD, Nothing())
        assert process.made == 0
        assert note.says_asleep

    asyncio.run(scenario())


def test_a_wake_makes_its_engine_once_and_it_knows_which_steps_are_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        process, note = await lost_asleep(tmp_path)
        await process.peer.call(SLEEP, SleepRequest(3))
        wakes = [process.peer.call(WAKE, Nothing()) for _ in range(3)]
        assert [reply.version for reply in await asyncio.gather(*wakes)] == [0, 0, 0]
        await process.peer.call(WAKE, Nothing())
        assert process.made == 1
        assert not note.says_asleep
        with pytest.raises(ContractError, match="step 2 is over"):
            await process.drawn(0, step=2)
        assert len(await process.drawn(0, step=3)) == 2
        await process.peer.call(SLEEP, SleepRequest(3))
        assert note.says_asleep

    asyncio.run(scenario())


def test_whoever_asks_it_for_work_knows_it_awake(tmp_path: Path) -> None:
    """As where the lead could not ask a process that was just starting."""

    async def scenario() -> None:
        process, note = await lost_asleep(tmp_path)
        drawn = await asyncio.gather(process.drawn(0), process.drawn(1))
        assert [len(headers) for headers in drawn] == [2, 2]
        assert process.made == 1
        assert not note.says_asleep

    asyncio.run(scenario())


def test_a_wake_goes_on_when_who_asked_for_it_goes_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        process, note = await lost_asleep(tmp_path)
        first = asyncio.ensure_future(process.peer.call(WAKE, Nothing()))
        while not process.made:
            await asyncio.sleep(0)
        first.cancel()
        await process.peer.call(WAKE, Nothing())
        assert process.made == 1
        assert not note.says_asleep

    asyncio.run(scenario())
