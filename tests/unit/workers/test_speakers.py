"""An environment asks other roles from outside the event loop: who is asked, and what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import fake

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError, WorkerDied
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import FINISHED, Prompt
from gcore_core.runtime.messages import TRAIN, AnswerItem, AskRequest, GenerateRequest
from gcore_core.wire.service import Call
from gcore_core.workers.role_sampler import LoopSpeaker, RoleSampler
from tests.support.generator_shells import shell_around

SOON_S = 10.0


class Replica:
    """Answers each request once it may.

    asked: texts of the questions so far.
    left: texts of those that nobody waits for any more.
    """

    def __init__(self, *errors: Exception) -> None:
        self.may = asyncio.Event()
        self.asked: list[str] = []
        self.left: list[str] = []
        self._errors = list(errors)

    async def stream(
        self, endpoint: Any, request: AskRequest, **_: Any
    ) -> AsyncGenerator[list[AnswerItem], None]:
        (question,) = request.questions
        text = question.prompt.text or ""
        self.asked.append(text)
        if self._errors:
            raise self._errors.pop()
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.left.append(text)
            raise
        yield [AnswerItem(question.index, 0, text.upper(), FINISHED, "", len(text), 1)]


def speaker_of(replicas: list[Any]) -> LoopSpeaker:
    sampler = RoleSampler("opponent", replicas, lambda: None)
    return LoopSpeaker(sampler, asyncio.get_running_loop())


def question(text: str) -> Question:
    return Question(prompt=Prompt(row=0, text=text), seed=1)


async def elsewhere(speaker: LoopSpeaker, *texts: str) -> list[Future[Answer]]:
    """Asks in a thread of its own, as an environment's calls run."""
    return await asyncio.to_thread(lambda: [speaker.ask(question(text)) for text in texts])


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not ready():
            await asyncio.sleep(0)


def soon(answer: Future[Answer]) -> Awaitable[Answer]:
    return asyncio.wait_for(asyncio.wrap_future(answer), SOON_S)


async def test_each_question_goes_to_the_replica_that_owes_least() -> None:
    replicas = [Replica(), Replica()]
    speaker = speaker_of(replicas)
    first = await elsewhere(speaker, "a", "b", "c", "d")
    await until(lambda: sum(len(one.asked) for one in replicas) == 4)
    assert [len(one.asked) for one in replicas] == [2, 2]
    replicas[1].may.set()
    await asyncio.gather(*(soon(answer) for answer in first if answer not in first[::2]))
    second = await elsewhere(speaker, "e", "f")
    await asyncio.gather(*map(soon, second))
    assert [len(one.asked) for one in replicas] == [2, 4], "the first one still owes two"
    replicas[0].may.set()
    assert [(await soon(answer)).text for answer in [*first, *second]] == list("ABCDEF")


async def test_it_may_be_asked_in_the_loop_itself_where_one_process_has_all_roles() -> None:
    replica = Replica()
    replica.may.set()
    answer = speaker_of([replica]).ask(question("a"))
    assert not answer.done(), "nothing answers before the loop goes on"
    assert (await soon(answer)).n_prompt == 1


async def test_what_a_lost_replica_owed_another_one_answers() -> None:
    replicas = [Replica(WorkerDied("it ended")), Replica()]
    replicas[1].may.set()
    (answer,) = await elsewhere(speaker_of(replicas), "a")
    assert (await soon(answer)).text == "A"
    assert [one.asked for one in replicas] == [["a"], ["a"]]


async def test_what_a_replica_raises_itself_is_raised_to_who_asked() -> None:
    (answer,) = await elsewhere(speaker_of([Replica(ContractError("it is asleep"))]), "a")
    with pytest.raises(ContractError, match="asleep"):
        await soon(answer)


async def test_a_question_that_nobody_waits_for_is_given_up() -> None:
    replica = Replica()
    speaker = speaker_of([replica])
    (answer,) = await elsewhere(speaker, "a")
    await until(lambda: bool(replica.asked))
    answer.cancel()
    await until(lambda: bool(replica.left))
    with pytest.raises(CancelledError):
        answer.result(0)


async def test_a_question_that_is_given_up_before_it_is_sent_is_owed_no_more() -> None:
    replicas: list[Any] = [Replica(), Replica()]
    sampler = RoleSampler("opponent", replicas, lambda: None)
    speaker = LoopSpeaker(sampler, asyncio.get_running_loop())
    early = speaker.ask(question("a"))
    await asyncio.sleep(0)
    early.cancel()  # it is dealt next, and given up before what sends it has begun
    await until(lambda: sampler._load.total() == 1)
    await until(lambda: sampler._load.total() == 0)
    replicas[0].may.set()
    await soon(speaker.ask(question("b")))
    assert [one.asked for one in replicas] == [["b"], []]


@pytest.mark.parametrize("version", [3, 1])
async def test_a_request_for_records_says_which_replicas_an_environment_may_ask(
    tmp_path: Path, version: int
) -> None:
    """One that was overtaken changes nothing."""
    replicas: list[Any] = [object(), object()]
    sampler = RoleSampler("opponent", replicas, lambda: None)
    sampler.route({"opponent": [0]}, 2)
    generator = fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
    shell = await shell_around(generator, tmp_path, asked=[sampler])
    awake = {"opponent": [1], "judge": [0]}
    request = GenerateRequest(0, 0, 0, TRAIN, [], least=0, awake=awake, awake_version=version)
    assert [one async for one in shell.generate(request, Call(lambda: None))] == []
    assert sampler._awake == ([1] if version == 3 else [0])
