"""Runs a backend's blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Compute(Protocol):
    """Runs ``work(*args)`` and returns what it gives.

    Calls run one at a time, in the order in which they are begun, so a caller may begin several.
    """

    async def __call__(self, work: Callable[..., T], *args: Any) -> T: ...


class ThreadCompute:
    """Runs calls in one thread of its own, so that the worker answers meanwhile.

    Backends need not be thread-safe.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="backend")

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


class DirectCompute:
    """Runs calls in the event loop itself, for the inline launcher and its debugger."""

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        await asyncio.sleep(0)
        return work(*args)
