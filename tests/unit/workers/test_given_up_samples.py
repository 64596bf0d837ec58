"""A generator that is to sleep gives up samples that nobody waits for; it does not sample them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import fake

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished
from gcore_core.contract.records import Header, Lease, Prompt
from gcore_core.runtime.messages import (
    TRAIN,
    AnswerItem,
    AskRequest,
    GenerateRequest,
    Nothing,
    QuestionItem,
    SleepRequest,
)
from gcore_core.wire.service import Call
from gcore_core.workers.generator import GeneratorShell
from tests.support.generator_shells import shell_around

SOON_S = 5.0


class HoldingGenerator(fake.FakeGenerator):
    """Ends no sample while it holds."""

    holds = True
    aborted: Sequence[tuple[int, int]] = ()

    def step(self) -> list[Finished]:
        return [] if self.holds else super().step()

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        self.aborted = [*self.aborted, *keys]
        return super().abort(keys)


async def shell_of(directory: Path, *, aborts: bool) -> tuple[GeneratorShell, HoldingGenerator]:
    generator = HoldingGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
    shell = await shell_around(generator, directory, aborts=aborts)
    return shell, generator


async def drawn(shell: GeneratorShell, ordinal: int, step: int = 0) -> list[Header]:
    leases = [Lease(ordinal, 0, 0, (0, 1))]
    request = GenerateRequest(step, ordinal, 0, TRAIN, leases, least=0)
    headers: list[Header] = []
    async with contextlib.aclosing(shell.generate(request, Call(lambda: None))) as stream:
        async for part in stream:
            headers += part
    return headers


async def begun(shell: GeneratorShell, ordinal: int) -> asyncio.Task[list[Header]]:
    """Returns a request whose samples run."""
    before = shell.owed()
    task = asyncio.ensure_future(drawn(shell, ordinal))
    while shell.owed() == before:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    return task


async def give_up(task: asyncio.Task[list[Header]]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def asleep(shell: GeneratorShell) -> None:
    await asyncio.wait_for(shell.sleep(SleepRequest(), Call(lambda: None)), SOON_S)


async def test_samples_that_nobody_waits_for_hold_up_no_sleep(tmp_path: Path) -> None:
    shell, generator = await shell_of(tmp_path, aborts=True)
    await give_up(await begun(shell, 0))
    await asleep(shell)
    assert (shell.owed(), sorted(generator.aborted)) == (0, [(0, 0), (0, 1)])


async def test_samples_that_were_given_up_are_drawn_again_for_who_asks(tmp_path: Path) -> None:
    """They are the same ones, since all of a sample follows from its seed."""
    shell, generator = await shell_of(tmp_path / "held", aborts=True)
    await give_up(await begun(shell, 0))
    await asleep(shell)
    await shell.wake(Nothing(), Call(lambda: None))
    generator.holds = False
    again = await asyncio.wait_for(drawn(shell, 0), SOON_S)
    other, free = await shell_of(tmp_path / "free", aborts=True)
    free.holds = False
    undisturbed = await asyncio.wait_for(drawn(other, 0), SOON_S)
    assert sorted((one.key, one.seal) for one in again) == sorted(
        (one.key, one.seal) for one in undisturbed
    )


async def test_samples_that_somebody_waits_for_end_before_the_sleep(tmp_path: Path) -> None:
    shell, generator = await shell_of(tmp_path, aborts=True)
    await give_up(await begun(shell, 0))
    waited_for = await begun(shell, 1)
    sleeping = asyncio.ensure_future(asleep(shell))
    await asyncio.sleep(0.05)
    assert not sleeping.done()
    generator.holds = False
    await sleeping
    assert sorted(generator.aborted) == [(0, 0), (0, 1)]
    assert sorted(header.key for header in await waited_for) == [(1, 0), (1, 1)]


async def test_a_request_that_comes_while_samples_are_given_up_gets_its_own(
    tmp_path: Path,
) -> None:
    shell, generator = await shell_of(tmp_path, aborts=True)
    await give_up(await begun(shell, 0))
    async with shell._engine.lock:  # as while the engine steps
        sleeping = asyncio.ensure_future(asleep(shell))
        await asyncio.sleep(0.01)
        asked = asyncio.ensure_future(drawn(shell, 0))
        await asyncio.sleep(0.05)
    generator.holds = False
    assert sorted(header.key for header in await asyncio.wait_for(asked, SOON_S)) == [
        (0, 0),
        (0, 1),
    ]
    await sleeping


async def test_a_generator_that_cannot_end_samples_ends_them_by_itself(tmp_path: Path) -> None:
    shell, generator = await shell_of(tmp_path, aborts=False)
    await give_up(await begun(shell, 0))
    sleeping = asyncio.ensure_future(asleep(shell))
    await asyncio.sleep(0.05)
    assert not sleeping.done()
    generator.holds = False
    await sleeping
    assert not generator.aborted


@pytest.mark.parametrize("aborts", [True, False])
async def test_a_generator_at_which_nothing_runs_goes_to_sleep(
    aborts: bool, tmp_path: Path
) -> None:
    shell, generator = await shell_of(tmp_path, aborts=aborts)
    await asleep(shell)
    assert not generator.aborted


async def test_records_that_are_being_stored_are_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, generator = await shell_of(tmp_path, aborts=True)
    records = shell._records
    stores = asyncio.Event()
    go_on = asyncio.Event()
    keep = records._keep

    async def slow(*args: Any) -> None:
        stores.set()
        await go_on.wait()
        await keep(*args)

    monkeypatch.setattr(records, "_keep", slow)
    task = await begun(shell, 0)
    generator.holds = False
    await stores.wait()
    await give_up(task)
    ending = set(records._ending)
    sleeping = asyncio.ensure_future(asleep(shell))
    await asyncio.sleep(0.05)
    go_on.set()
    await sleeping
    assert ending and ending.isdisjoint(generator.aborted)
    assert shell.owed() == 0


async def answered(shell: GeneratorShell, number: int) -> list[AnswerItem]:
    question = QuestionItem(0, Prompt(row=0, text=f"{number}?"), 5, [0, 1], True, [])
    answers: list[AnswerItem] = []
    async with contextlib.aclosing(shell.ask(AskRequest([question]), Call(lambda: None))) as stream:
        async for part in stream:
            answers += part
    return answers


async def test_a_question_that_nobody_waits_for_is_taken_back_from_the_engine(
    tmp_path: Path,
) -> None:
    """Another one goes on, and the engine draws it alone."""
    shell, generator = await shell_of(tmp_path, aborts=True)
    given_up, kept = [asyncio.ensure_future(answered(shell, number)) for number in range(2)]
    async with asyncio.timeout(SOON_S):
        while len(generator._running) < 4:
            await asyncio.sleep(0)
        asked = set(generator._running)
        given_up.cancel()
        while len(generator._running) > 2:
            await asyncio.sleep(0)
        assert set(generator.aborted) == asked - set(generator._running)
        generator.holds = False
        assert len(await kept) == 2
