"""Asking again when a message or a connection was lost, and how long that may take. Requests are
keyed, so their receivers run them once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from gcore_core.contract.errors import DeadlineExceeded, WorkerDied
from gcore_core.runtime.rpc.endpoints import Endpoint, Reply, Request
from gcore_core.runtime.rpc.service import PROGRESS_S, Peer

TRIES = 100  # three minutes: one that was lost may have a model to load


class Insist(Protocol):
    """How ``insist`` is called, for those who are given it."""

    async def __call__(
        self, peer: Peer, endpoint: Endpoint[Request, Reply], request: Request, deadline_s: float
    ) -> Reply: ...


async def insist(
    peer: Peer, endpoint: Endpoint[Request, Reply], request: Request, deadline_s: float
) -> Reply:
    """Calls until there is an answer, at most ``TRIES`` times; what the peer itself raised is
    raised at once.
    """
    return await insist_anew(peer, endpoint, lambda: request, deadline_s)


async def insist_anew(
    peer: Peer,
    endpoint: Endpoint[Request, Reply],
    request: Callable[[], Request],
    deadline_s: float,
) -> Reply:
    """Like ``insist``; ``request`` makes what each attempt sends, since what it says may change."""
    for attempt in range(TRIES):
        try:
            return await peer.call(endpoint, request(), deadline_s=deadline_s)
        except (WorkerDied, DeadlineExceeded):
            if attempt == TRIES - 1:
                raise
            await asyncio.sleep(backoff_s(attempt))
    raise AssertionError("unreachable")


@contextlib.contextmanager
def shown(progress: Callable[[], None], waits: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Within, while it ``waits`` for others, who have deadlines of their own, progress is shown all
    the time.
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


def brief_s(patience_s: float) -> float:
    """Of ``run.patience_s``, what is enough for work of seconds: a node agent's answer, a bucket
    that is loaded.
    """
    return min(patience_s, max(60.0, patience_s / 10))


def backoff_s(attempt: int) -> float:
    return min(2.0, 0.05 * 2.0**attempt)
