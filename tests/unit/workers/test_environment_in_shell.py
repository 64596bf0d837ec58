"""A generator's worker asks its environment for samples, and its backend for all else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from gcore_testing import fake
from gcore_testing.contracts.weights import perturbed, push
from gcore_testing.fake_environment import FakeEnvironment

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.order import FIRST_QUESTION
from gcore_core.contract.records import Header, Lease, Prompt
from gcore_core.runtime.messages import (
    TRAIN,
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


class Episodes(FakeEnvironment):
    """Notes what it is asked; while it holds, no episode goes on."""

    holds = False

    def __init__(self, generator: fake.FakeGenerator) -> None:
        super().__init__(None, WorkerContext(role="rollout"), generator)
        self.asked: list[SampleRequest] = []
        self.aborted: list[tuple[int, int]] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.asked += requests
        super().submit(requests)

    def step(self) -> list[Finished]:
        return [] if self.holds else super().step()

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        self.aborted += keys
        return super().abort(keys)


@pytest.fixture
def generator() -> fake.FakeGenerator:
    return fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))


@pytest.fixture
def episodes(generator: fake.FakeGenerator) -> Episodes:
    return Episodes(generator)


async def drawn(shell: GeneratorShell, ordinal: int) -> list[Header]:
    leases = [Lease(ordinal, 0, 0, (0, 1))]
    request = GenerateRequest(0, ordinal, 0, TRAIN, leases, least=0)
    headers: list[Header] = []
    async with contextlib.aclosing(shell.generate(request, Call(lambda: None))) as stream:
        async for part in stream:
            headers += part
    return headers


async def begun(
    shell: GeneratorShell, episodes: Episodes, ordinal: int
) -> asyncio.Task[list[Header]]:
    """Returns a request whose episodes are open."""
    before = len(episodes.asked)
    task = asyncio.ensure_future(drawn(shell, ordinal))
    while len(episodes.asked) == before:
        await asyncio.sleep(0)
    return task


async def test_samples_are_asked_of_the_environment(
    generator: fake.FakeGenerator, episodes: Episodes, tmp_path: Path
) -> None:
    shell = await shell_around(generator, tmp_path, draws=episodes)
    headers = await asyncio.wait_for(drawn(shell, 7), SOON_S)
    assert sorted((one.ordinal, one.sample) for one in headers) == [(7, 0), (7, 1)]
    assert [(one.ordinal, one.sample) for one in episodes.asked] == [(7, 0), (7, 1)]


async def test_questions_of_rewards_go_through_the_environment(
    generator: fake.FakeGenerator, episodes: Episodes, tmp_path: Path
) -> None:
    shell = await shell_around(generator, tmp_path, draws=episodes)
    question = QuestionItem(0, Prompt(row=0, text="1+2="), 5, [0, 1], True, [])
    answers = []
    async with contextlib.aclosing(shell.ask(AskRequest([question]), Call(lambda: None))) as stream:
        async for part in stream:
            answers += part
    assert len(answers) == 2
    assert all(one.ordinal >= FIRST_QUESTION for one in episodes.asked)


async def test_episodes_that_nobody_waits_for_are_given_up_before_a_sleep(
    generator: fake.FakeGenerator, episodes: Episodes, tmp_path: Path
) -> None:
    """The generator then has none of their turns, and it is the generator that sleeps."""
    shell = await shell_around(generator, tmp_path, draws=episodes, aborts=True)
    episodes.holds = True
    task = await begun(shell, episodes, 3)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await asyncio.wait_for(shell.sleep(SleepRequest(), Call(lambda: None)), SOON_S)
    assert sorted(episodes.aborted) == [(3, 0), (3, 1)]
    assert not generator._running
    assert generator._asleep
    await shell.wake(Nothing(), Call(lambda: None))
    episodes.holds = False
    assert len(await asyncio.wait_for(drawn(shell, 4), SOON_S)) == 2


async def test_a_sleep_waits_for_episodes_that_somebody_waits_for(
    generator: fake.FakeGenerator, episodes: Episodes, tmp_path: Path
) -> None:
    shell = await shell_around(generator, tmp_path, draws=episodes, aborts=True)
    episodes.holds = True
    task = await begun(shell, episodes, 3)
    asleep = asyncio.ensure_future(shell.sleep(SleepRequest(), Call(lambda: None)))
    await asyncio.sleep(0)
    assert not asleep.done()
    episodes.holds = False
    assert len(await asyncio.wait_for(task, SOON_S)) == 2
    await asyncio.wait_for(asleep, SOON_S)
    assert not episodes.aborted


async def test_a_push_between_two_turns_of_an_episode_shows_in_its_record(
    generator: fake.FakeGenerator, episodes: Episodes, tmp_path: Path
) -> None:
    """It goes to the generator while no step runs, and the episode goes on under it."""
    shell = await shell_around(generator, tmp_path, draws=episodes)
    episodes.holds = True
    task = await begun(shell, episodes, 3)
    async with shell._engine.lock:
        while not any(one.turns for one in episodes._open.values()):
            assert not FakeEnvironment.step(episodes)
        push(generator, perturbed(list(fake.tensors_of(fake.initial_logits(0)))), 5)
    episodes.holds = False
    headers = await asyncio.wait_for(task, SOON_S)
    assert {tuple(one.versions) for one in headers} == {(0, 5)}
