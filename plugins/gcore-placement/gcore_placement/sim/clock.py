"""Spends time: in a thread by sleeping, in an event loop by its clock, which may be virtual."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
Progress = Callable[[], None]
_SLICE_S = 1.0  # progress is called this often, so that no deadline passes
#: A timer that is later than this is late. On virtual time only rounding makes a difference.
_LATE_S = 1e-6


def _sleep(seconds: float, progress: Progress) -> None:
    """Sleeps in this thread, and calls ``progress`` every second meanwhile."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > _SLICE_S:
        time.sleep(_SLICE_S)
        progress()
    time.sleep(max(left_s, 0.0))


_spender: ContextVar[Callable[[float, Progress], None]] = ContextVar("spender", default=_sleep)


def spend(seconds: float, progress: Progress = lambda: None) -> None:
    """Lets ``seconds`` pass for the caller of this backend.

    progress: is called every second meanwhile, so that nobody takes the backend for stuck.
    """
    if seconds > 0:
        _spender.get()(seconds, progress)


def _call_here(work: Callable[..., T], *args: Any) -> T:
    return work(*args)


class LoopCompute:
    """Runs a backend's calls while the event loop waits, one at a time.

    What a call spends passes on the loop's clock before the call is answered. So hundreds of
    backends need no thread each, and time may be virtual.

    A timer of the loop is late: by up to a millisecond, which is how exactly the system waits, and
    by more where many backends share the loop. Where emulated time is short, an engine would be
    slower by that for each of its steps. So what a spending was late by is taken off the next ones,
    until it is used up. It has no limit: a machine that stands still stops no emulated device.

    call: makes each call, ``call(work, *args)``; None: the event loop's thread does.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call or _call_here
        self._lock = asyncio.Lock()
        self._late_s = 0.0

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        async with self._lock:
            # The call itself runs at once and only notes what it spends; the time passes after it.
            spendings: list[tuple[float, Progress]] = []
            token = _spender.set(lambda seconds, progress: spendings.append((seconds, progress)))
            try:
                result: T = self._call(work, *args)
            finally:
                _spender.reset(token)
            await asyncio.sleep(0)
            for seconds, progress in spendings:
                await self._spend(seconds, progress)
            return result

    async def _spend(self, seconds: float, progress: Progress) -> None:
        """Lets ``seconds`` pass, less what earlier spendings were too long by."""
        clock = asyncio.get_running_loop().time
        caught_up_s = min(self._late_s, seconds)
        self._late_s -= caught_up_s
        left_s = seconds - caught_up_s
        until_s = clock() + left_s
        whole_slices, rest_s = divmod(left_s, _SLICE_S)
        for _ in range(int(whole_slices)):
            await asyncio.sleep(_SLICE_S)
            progress()
        await asyncio.sleep(rest_s)
        late_s = clock() - until_s
        if late_s > _LATE_S:
            self._late_s += late_s
