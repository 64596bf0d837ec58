"""Asking again when a message or a connection was lost. Requests are keyed, so their receivers run them once."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from gcore_core.errors import DeadlineExceeded, WorkerDied
from gcore_core.processes.service import Peer

T = TypeVar("T")
TRIES = 100  # three minutes: one that was lost may have a model to load


async def insist(peer: Peer, method: str, request: Any, reply: type[T], deadline_s: float) -> T:
    """Calls until there is an answer, at most ``TRIES`` times; what the peer itself raised is raised at once."""
    for attempt in range(TRIES):
        try:
            return await peer.call(method, request, reply, deadline_s=deadline_s)
        except (WorkerDied, DeadlineExceeded):
            if attempt == TRIES - 1:
                raise
            await asyncio.sleep(backoff_s(attempt))
    raise AssertionError("unreachable")


def backoff_s(attempt: int) -> float:
    return min(2.0, 0.05 * 2.0**attempt)
