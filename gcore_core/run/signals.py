"""SIGTERM and Ctrl-C: the first asks the run to save its state and end, the second ends it at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Seconds in which a state may be saved. SIGTERM mostly comes from a scheduler, which often kills
#: after thirty.
SAVE_WITHIN_S = {signal.SIGTERM: 20.0, signal.SIGINT: 6.0}
END_WITHIN_S = (
    4.0  # after these: a thread that hangs then, as one that waits for a disk, is left where it is
)


class Signals:
    """code: the exit code of who was told to end, 143 or 130; 0 of who was not."""

    def __init__(self) -> None:
        self.code = 0
        self._told = 0
        self._asks: Callable[[signal.Signals], object] | None = None
        self._end: threading.Timer | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Signals are handled here, but for those that are ignored, as in the background of a
        script. One that comes while nothing is asked by them raises KeyboardInterrupt.
        """
        heard = [number for number in SAVE_WITHIN_S if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._tell) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._end is not None:
                self._end.cancel()

    @contextlib.contextmanager
    def ask(self, stop: Callable[[float], bool]) -> Iterator[None]:
        """Within, the first signal calls ``stop`` with the seconds that are left to save. The next
        one, or the first when that gives False, cancels the task that is running now. The process
        ends in time, whatever hangs.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def asked(number: signal.Signals) -> None:
            if self._end is None:
                self._end = threading.Timer(
                    SAVE_WITHIN_S[number] + END_WITHIN_S, os._exit, [self.code]
                )
                self._end.daemon = True
                self._end.start()
                if stop(SAVE_WITHIN_S[number]):
                    return
            if task is not None:
                task.cancel()

        self._asks = lambda number: loop.call_soon_threadsafe(asked, number)
        try:
            yield
        finally:
            self._asks = None

    def _tell(self, number: int, frame: Any) -> None:
        self._told, self.code = self._told + 1, 128 + number
        if self._asks is None or self._told > 2:
            raise KeyboardInterrupt
        self._asks(signal.Signals(number))
