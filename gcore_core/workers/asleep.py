"""Answers for a generator that was lost while it slept, and makes its backend at its wake."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from gcore_core.contract.errors import ContractError
from gcore_core.contract.records import Header
from gcore_core.contract.sentinel import Finding
from gcore_core.contract.step_check import Held
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.messages import (
    ASK,
    EXPLAIN,
    GENERATE,
    PUSH_HELD,
    PUSH_PULL,
    RELEASE_STEPS,
    SCORE_AGAIN,
    SLEEP,
    WAKE,
    AnswerItem,
    AskRequest,
    ExplainRequest,
    GenerateRequest,
    Nothing,
    PullWeights,
    PushConfirmed,
    ReleaseSteps,
    ScoreAgain,
    SleepRequest,
    WakeReply,
)
from gcore_core.wire.gathering import shared
from gcore_core.wire.retry import keep_alive
from gcore_core.wire.service import Call, Service
from gcore_core.workers.generator import GeneratorShell
from gcore_core.workers.sleep_note import SleepNote


class SleepingGenerator:
    """Answers for a generator whose process was lost while it slept, until it is woken.

    A wake makes its backend and the shell around it, which answers from then on. So does any work:
    who asks for that knows that the replica is awake. It may do so without a wake, as where the
    lead could not ask a process that was just starting.

    make: makes the backend and its shell; it runs where the backend's calls run.
    note: removed when both are made.
    """

    def __init__(
        self,
        make: Callable[[], GeneratorShell],
        compute: Compute,
        note: SleepNote,
        name: str,
    ) -> None:
        self._make = make
        self._compute = compute
        self._note = note
        self._name = name
        self._release_before = 0
        self._waking: asyncio.Task[GeneratorShell] | None = None

    def register(self, service: Service) -> None:
        self._service = service
        service.add(GENERATE, self.generate)
        service.add(PUSH_PULL, self.pull)
        service.add(PUSH_HELD, self.held)
        service.add(RELEASE_STEPS, self.release_steps)
        service.add(EXPLAIN, self.explain)
        service.add(SCORE_AGAIN, self.score_again)
        service.add(ASK, self.ask)
        service.add(SLEEP, self.sleep)
        service.add(WAKE, self.wake)

    async def sleep(self, request: SleepRequest, call: Call) -> Nothing:
        if self._waking is not None:  # it was asked before the wake was over
            return await (await self._awake()).sleep(request, call)
        self._release_before = max(self._release_before, request.release_before)
        return Nothing()

    async def wake(self, request: Nothing, call: Call) -> WakeReply:
        return await (await self._awake()).wake(request, call)

    async def generate(
        self, request: GenerateRequest, call: Call
    ) -> AsyncGenerator[list[Header], None]:
        shell = await self._awake()
        async with contextlib.aclosing(shell.generate(request, call)) as parts:
            async for headers in parts:
                yield headers

    async def ask(self, request: AskRequest, call: Call) -> AsyncGenerator[list[AnswerItem], None]:
        shell = await self._awake()
        async with contextlib.aclosing(shell.ask(request, call)) as parts:
            async for answers in parts:
                yield answers

    async def pull(self, request: PullWeights, call: Call) -> PushConfirmed:
        return await (await self._awake()).pull(request, call)

    async def release_steps(self, request: ReleaseSteps, call: Call) -> Nothing:
        self._release_before = max(self._release_before, request.before)
        if self._waking is not None:
            await (await self._awake()).release_steps(request, call)
        return Nothing()

    async def held(self, request: Nothing, call: Call) -> Held:
        raise self._asleep()

    async def explain(self, request: ExplainRequest, call: Call) -> list[Finding]:
        return []

    async def score_again(self, request: ScoreAgain, call: Call) -> list[list[float]]:
        return []

    def _asleep(self) -> ContractError:
        return ContractError(
            "this generator sleeps, and holds no weights",
            where=self._name,
            why="its process was lost while it slept, and was started again",
        )

    async def _awake(self) -> GeneratorShell:
        """Returns the shell around the backend, and makes both where nobody has done so yet.

        They are made once, and to the end: who asked first may go away meanwhile.
        """
        if self._waking is None:
            self._waking = asyncio.ensure_future(self._wake())
        # To load a model may take as long as at the start of a run, where nothing bounds it either.
        with keep_alive(self._service.progress):
            return await shared(self._waking)

    async def _wake(self) -> GeneratorShell:
        shell = await self._compute(self._make)
        await shell.release_steps(ReleaseSteps(self._release_before), Call(lambda: None))
        self._note.remove()
        shell.register(self._service)
        return shell
