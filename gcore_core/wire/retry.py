"""Tries again what was lost on the way: one policy, and the calls that follow it.

How long a single call may take is said by ``gcore_core.contract.deadlines``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gcore_core.contract.errors import DeadlineExceeded, WorkerDied
from gcore_core.contract.launching import Endpoint, Peer, Reply, Request
from gcore_core.wire.service import PROGRESS_S

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Says how often something is tried again, and how long after.

    tries: at most so many, the first one included.
    first_pause_s, longest_pause_s: the pause after the first try; it doubles after each, up to the
        longest.
    """

    tries: int
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0

    def pause_s(self, attempt: int) -> float:
        """Returns the seconds between try ``attempt``, counted from 0, and the next."""
        return min(self.longest_pause_s, self.first_pause_s * 2.0**attempt)

    async def run(
        self, attempt: Callable[[int], Awaitable[T]], retried: tuple[type[Exception], ...]
    ) -> T:
        """Calls ``attempt(0)``, ``attempt(1)`` and so on until one returns; returns what it gives.

        An attempt that raises one of ``retried`` is followed by another, after a pause.

        Raises what the last try raised, and at once whatever is not among ``retried``.
        """
        for number in range(self.tries - 1):
            try:
                return await attempt(number)
            except retried:
                await asyncio.sleep(self.pause_s(number))
        return await attempt(self.tries - 1)


#: What says that nobody knows whether a request arrived: its process, or the way to it, is gone.
LOST = (WorkerDied, DeadlineExceeded)
#: All pauses together are three minutes: a worker that takes a lost one's place may have a model to
#: load.
#: Over sockets each try also waits until somebody answers at the address, half a minute by default:
#: a process that never comes is given up after most of an hour.
PATIENT = RetryPolicy(tries=100)
#: For a push that failed and begins again: what disturbs one, such as a generator that is started
#: again, is over soon. Where every hundredth message ends a process, five tries in a row have been
#: seen to fail. What fails ten times has a lasting cause.
PUSHES = RetryPolicy(tries=10)


class Insist(Protocol):
    """Calls as ``insist`` does; this is its type, for those who get it as an argument."""

    async def __call__(
        self,
        peer: Peer,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        deadline_s: float | None = None,
    ) -> Reply: ...


async def insist(
    peer: Peer,
    endpoint: Endpoint[Request, Reply],
    request: Request,
    deadline_s: float | None = None,
) -> Reply:
    """Calls until there is an answer, by ``PATIENT``. The receiver must bear a repetition.

    Most requests have a key by which receivers run them once.

    deadline_s: of each call; by default the endpoint's own. What the peer itself raised is raised
    at once.
    """
    return await insist_with(peer, endpoint, lambda: request, deadline_s)


async def insist_with(
    peer: Peer,
    endpoint: Endpoint[Request, Reply],
    request: Callable[[], Request],
    deadline_s: float | None = None,
) -> Reply:
    """Calls like ``insist``, but ``request`` makes a new request for each attempt.

    What a request says may change between attempts.
    """

    def call(attempt: int) -> Awaitable[Reply]:
        return peer.call(endpoint, request(), deadline_s=deadline_s)

    return await PATIENT.run(call, LOST)


@contextlib.contextmanager
def keep_alive(
    progress: Callable[[], None], waits: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Sends progress every ``PROGRESS_S``, inside the block, while ``waits`` returns true.

    It is for a request that waits for others, who have deadlines of their own.

    progress: sends a sign of progress to the process that waits for this one.
    waits: whether the request waits for others at this moment.
    """

    async def tick() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            if waits():
                progress()

    ticking = asyncio.ensure_future(tick())
    try:
        yield
    finally:
        ticking.cancel()
