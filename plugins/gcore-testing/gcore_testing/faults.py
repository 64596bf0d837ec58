"""Injects faults into simulated runs.

Messages are lost, delayed, doubled or overtaken, and processes are killed at a message and started
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from gcore_core.contract.errors import WorkerDied
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Body, Call, Service

#: What can happen to a message.
#: noticed: it is lost, and the sender sees a broken connection.
#: silent: it is lost, and only the sender's deadline notices.
#: twice: it arrives twice; this happens to requests only.
#: late: it arrives up to LATE_S seconds later.
#: overtaken: it arrives after the next message on the same line, or after LATE_S seconds.
#: kill: it arrives, and some process is killed.
FAULTS = ("noticed", "silent", "twice", "late", "overtaken", "kill")
LATE_S = 20.0
SLOW_S = 10.0  # by which, at most, a slow process delays a message
DEAD_S = 3.0  # seconds after which, at the latest, a killed process starts again


class Life:
    """Owns the tasks of one life of a simulated process, and cancels them when the life ends.

    name: the process.
    number: which of its lives this is.
    over: whether the process was killed.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.over = False
        # In the order of their start, so that a seed repeats its run; a set would go by addresses.
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], None] = (
            weakref.WeakKeyDictionary()
        )

    def owns(self, task: asyncio.Task[Any]) -> None:
        """Adds a task. In a life that is over it is cancelled at once."""
        self._tasks[task] = None
        if self.over:
            task.cancel()

    def end(self) -> None:
        """Ends the life, as a kill does."""
        self.over = True
        for task in list(self._tasks):
            task.cancel()


# The life on whose behalf code runs. asyncio copies the context into every new task, so that a task
# belongs to the same life as the code that started it.
_life: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class LastingService(Service):
    """Serves a process that is never killed.

    The tasks that it starts for a caller do not end with that caller.
    """

    async def handle(self, method: str, body: Body, call: Call, emit: Any) -> bytes:
        _life.set(None)
        return await super().handle(method, body, call, emit)


class MortalService(Service):
    """Serves a process that can be killed; its callers then get WorkerDied."""

    def __init__(self, life: Life) -> None:
        super().__init__(life.name)
        self.life = life

    async def handle(self, method: str, body: Body, call: Call, emit: Any) -> bytes:
        _life.set(self.life)
        work = asyncio.ensure_future(super().handle(method, body, call, emit))
        try:
            return await work
        except asyncio.CancelledError:
            work.cancel()
            if self.life.over:
                raise WorkerDied(f"{self.life.name} was killed", where=method) from None
            raise


def _owned(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    context: contextvars.Context | None = None,
) -> asyncio.Task[Any]:
    """Makes a task, as the loop's task factory, and gives it to the life that started it."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    if (life := _life.get()) is not None:
        life.owns(task)
    return task


class Faults:
    """Makes weather with faults, which are drawn by a seed.

    hits: (sender's role, method, fault) -> how often it happened.
    role_calls: (sender's role, method) of every message.
    """

    def __init__(self, seed: int, *, rate: float = 0.08, kills: float = 0.0025) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._kills = kills
        self.hits: Counter[tuple[str, str, str]] = Counter()
        self.role_calls: set[tuple[str, str]] = set()
        self._passed: dict[tuple[str, str], asyncio.Event] = {}
        self._births: dict[str, Callable[[Life], MortalService]] = {}
        self._buried: Callable[[Life], None] = lambda life: None

    async def begin(
        self,
        network: InlineNetwork,
        births: dict[str, Callable[[Life], MortalService]],
        buried: Callable[[Life], None],
    ) -> None:
        """Starts the faults on a network.

        births: process -> a function that makes its service for a new life.
        buried: called with every life that has ended.
        """
        self._network = network
        self._births = births
        self._buried = buried
        asyncio.get_running_loop().set_task_factory(_owned)

    async def travel(self, source: str, target: str, method: str) -> int:
        """Delays one message and returns how often it arrives: 0, 1 or 2 times."""
        role = source.rstrip("0123456789.")
        self.role_calls.add((role, method))
        # If a message on this line waits to be overtaken, this one releases it on its arrival.
        line = source, target
        arrived = self._passed.pop(line, None)
        await asyncio.sleep(self._random.uniform(0, 0.5))
        if arrived is not None:
            arrived.set()
        fate = self._random.random()
        if fate < self._kills:
            self._kill(self._random.choice(sorted(self._births)))
            self.hits[role, method, "kill"] += 1
            return 1
        if fate >= self._kills + self._rate:
            return 1
        fault = self._random.choice(FAULTS[:-1])
        service = self._network.services.get(target)
        handlers = service._handlers if isinstance(service, Service) else {}
        if fault == "twice" and method not in handlers:
            return 1  # only requests arrive twice
        self.hits[role, method, fault] += 1
        if fault == "silent":
            await asyncio.get_running_loop().create_future()  # never returns; the deadline ends it
        if fault == "late":
            await asyncio.sleep(self._random.uniform(0, LATE_S))
        if fault == "overtaken":
            await self._overtaken(line)
        return {"noticed": 0, "twice": 2}.get(fault, 1)

    async def _overtaken(self, line: tuple[str, str]) -> None:
        """Waits until the next message on the same line has arrived, for at most LATE_S seconds."""
        waiting = self._passed.setdefault(line, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LATE_S):
                await waiting.wait()

    def _kill(self, name: str) -> None:
        """Ends the current life of a process and starts the next one after a while."""
        service = self._network.services.pop(name, None)
        if not isinstance(service, MortalService):
            return  # dead already
        service.life.end()
        self._buried(service.life)
        # An empty context: the new life must not belong to the one whose message kills here.
        born = contextvars.Context().run(
            asyncio.ensure_future, self._again(name, service.life.number + 1)
        )
        self._network.copies.add(born)
        born.add_done_callback(self._network.copies.discard)

    async def _again(self, name: str, number: int) -> None:
        """Makes a new life of a process and has the network serve it."""
        await asyncio.sleep(self._random.uniform(0, DEAD_S))
        await self._network.view(name).serve(name, self._births[name](Life(name, number)))


class Laggards(Faults):
    """Adds to the faults one process that is slow all the time, and one that stands still a while.

    slow: every message to and from it takes up to ``SLOW_S`` longer.
    stalled: no message reaches it between two times of the run; it is not killed.
    """

    def __init__(
        self,
        seed: int,
        *,
        slow: str,
        stalled: str,
        stalls_s: tuple[float, float],
        kills: float = 0.0025,
    ) -> None:
        super().__init__(seed, kills=kills)
        self._slow = slow
        self._stalled = stalled
        self._stalls_s = stalls_s
        self._pauses = random.Random(seed)

    async def travel(self, source: str, target: str, method: str) -> int:
        if self._slow in (source, target):
            await asyncio.sleep(self._pauses.uniform(0, SLOW_S))
        begins_s, ends_s = self._stalls_s
        now_s = asyncio.get_running_loop().time()
        if self._stalled in (source, target) and begins_s <= now_s < ends_s:
            await asyncio.sleep(ends_s - now_s)
        return await super().travel(source, target, method)
