"""Handles SIGTERM and Ctrl-C: the first has a run save its state and end, a second ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gcore_core.contract.errors import ConfigError

#: Seconds in which a state may be saved. SIGTERM mostly comes from a scheduler, which often kills
#: after thirty.
SAVE_WITHIN_S = {signal.SIGTERM: 20.0, signal.SIGINT: 6.0}
#: Seconds after these until the process exits, even if a thread of it hangs, as one may that waits
#: for a disk.
END_WITHIN_S = 4.0
#: From this signal on, the main thread gets a KeyboardInterrupt, too.
_AT_ONCE = 3


#: A signal that only the process before this one got (``restart_supervisor``) comes as this number
#: plus its own. A signal to the whole group reaches both; then it comes twice and counts once.
PASSED_ON = signal.SIGRTMIN


def signal_name(number: int) -> str:
    """Returns the name of a signal; of one that has none, its number."""
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


class Signals:
    """Receives the signals of one process.

    code: the exit code after a signal: 143 for SIGTERM, 130 for Ctrl-C; 0 while there was none.
    """

    def __init__(self) -> None:
        self.code = 0
        self._received = 0
        # number of a signal -> how often it came [directly, passed on]
        self._ways: dict[int, list[int]] = {number: [0, 0] for number in SAVE_WITHIN_S}
        self._act: Callable[[signal.Signals], object] | None = None
        self._end: threading.Timer | None = None
        self._process = 0  # that these signals are for; 0: none yet
        self._handlers_before: dict[int, Any] = {}

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handles signals inside the block. Outside of ``ask``, each raises KeyboardInterrupt.

        A signal that the process ignores stays ignored, as Ctrl-C is in the background of a script.
        Raises ConfigError in any other thread than the main one.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "a run is supervised in the main thread of its process alone.",
                where=f"thread {threading.current_thread().name}",
                why="signals, and functions that set handlers of signals, work in that one alone",
                todo="call gcore.train, which starts a process; it may be called in any thread",
            )
        numbers = [
            int(number) for number in SAVE_WITHIN_S if signal.getsignal(number) != signal.SIG_IGN
        ]
        numbers += [PASSED_ON + number for number in numbers]
        self._process = os.getpid()
        self._handlers_before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
            if self._end is not None:
                self._end.cancel()

    @contextlib.contextmanager
    def ask(self, stop: Callable[[float], bool]) -> Iterator[None]:
        """Lets the first signal, inside the block, call ``stop`` with the seconds that are left to
        save.

        The second one cancels the task that entered here, and so does the first one when ``stop``
        returns False. The process exits in time even if something hangs.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def act(number: signal.Signals) -> None:
            if self._end is None:  # the first signal
                self._end = threading.Timer(
                    SAVE_WITHIN_S[number] + END_WITHIN_S, os._exit, [self.code]
                )
                self._end.daemon = True
                self._end.start()
                if stop(SAVE_WITHIN_S[number]):
                    return
            if task is not None:
                task.cancel()

        self._act = lambda number: loop.call_soon_threadsafe(act, number)
        try:
            yield
        finally:
            self._act = None

    def _receive(self, number: int, frame: Any) -> None:
        """Handles a signal; ``ask`` decides on the event loop what to do."""
        if os.getpid() != self._process:  # one that a function of the user has forked
            signal.signal(number, self._handlers_before[number])
            signal.raise_signal(number)
            return
        is_passed_on = number >= PASSED_ON
        if is_passed_on:
            number -= PASSED_ON
        ways = self._ways[number]
        ways[is_passed_on] += 1
        if ways[is_passed_on] <= ways[not is_passed_on]:
            return  # the same one has come the other way
        self._received += 1
        self.code = 128 + number
        act = self._act  # the event loop's thread may take it back meanwhile
        if act is not None:
            act(signal.Signals(number))
        if act is None or self._received >= _AT_ONCE:
            raise KeyboardInterrupt
