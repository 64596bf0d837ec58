"""Runs a backend's blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from gcore_core.runtime.main_thread import carried, in_main_thread

T = TypeVar("T")


class Compute(Protocol):
    """Runs ``work(*args)`` and returns what it gives.

    Calls run one at a time, in the order in which they are begun, so a caller may begin several.
    """

    async def __call__(self, work: Callable[..., T], *args: Any) -> T: ...


class ThreadCompute:
    """Runs calls in one thread, so that the worker answers meanwhile.

    Backends need not be thread-safe. See ``main_thread.carried`` for what they raise.

    executor: has that thread; None: one of this object's own.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="backend")

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, carried, work, *args)


class DirectCompute:
    """Runs calls while the event loop waits, for the inline launcher and its debugger."""

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        await asyncio.sleep(0)
        return in_main_thread(work, *args)
