"""Starts the supervisor as a child, and again from the newest checkpoint when it is killed.

``g-core run`` is two processes. The first one does nothing but wait: whoever looks for memory to
free, or kills what has a large log, does not find it. The second one is the supervisor. Signals
that only the first one gets are passed on; when the first one is killed, the second one is too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import WorkerDied
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.signals import PASSED_ON, SAVE_WITHIN_S
from gcore_core.runtime.process.spawn import signal_at_end


class Begun(msgspec.Struct, frozen=True):
    """Is what the supervisor tells as soon as it knows it.

    directory: the run's.
    restarts: how often the run may go on from a checkpoint.
    """

    directory: str
    restarts: int


#: Called by the supervisor with what it has to tell.
Tell = Callable[[Begun], None]
#: Runs a job to its end, as the supervisor: (directory of a run that goes on, how to tell).
Supervise = Callable[[Path | None, Tell], int]


class _Lost(Exception):
    """The supervisor was killed.

    begun: what it had told; None: nothing yet.
    """

    def __init__(self, number: int, begun: Begun | None) -> None:
        super().__init__(number)
        self.number = number
        self.begun = begun


def guarded(supervise: Supervise) -> int:
    """Runs ``supervise`` in a child process and returns its exit code; in the child, its result.

    A child that is killed is replaced by one that goes on from the run's newest checkpoint, as
    often as ``checkpoint.restarts`` says. Raises WorkerDied when that is not possible, and what
    ``supervise`` raises in the child alone.
    """
    resume: Path | None = None
    n_lost = 0
    guard = _Guard()
    while True:
        tell = guard.fork()
        if tell is not None:
            return supervise(resume, tell)
        try:
            return guard.wait()
        except _Lost as lost:
            n_lost += 1
            resume = _goes_on_from(lost, n_lost)
            name = signal.Signals(lost.number).name
            print(f"the supervisor ended with signal {name}; it is started again", flush=True)


def _goes_on_from(lost: _Lost, n_lost: int) -> Path:
    """Returns the directory of the run; raises WorkerDied where it cannot go on."""
    begun = lost.begun
    if (
        begun is not None
        and n_lost <= begun.restarts
        and Checkpoints(Path(begun.directory)).steps()
    ):
        return Path(begun.directory)
    raise WorkerDied(
        f"ended with signal {signal.Signals(lost.number).name}",
        where="supervisor",
        why="there is no checkpoint to go on from, or checkpoint.restarts are used up",
        todo=f"the run is in {begun.directory}" if begun is not None else "",
        process="supervisor",
    ) from None


class _Guard:
    """Holds the present child."""

    def __init__(self) -> None:
        self._child = 0
        self._lifeline = -1
        self._told = -1
        self._stops = False  # whether a signal was passed on
        # One that this process ignores stays ignored.
        self._handlers = {
            number: handler
            for number in SAVE_WITHIN_S
            if (handler := signal.getsignal(number)) != signal.SIG_IGN
        }

    def fork(self) -> Tell | None:
        """Starts a child. Returns None here, and in the child its way to tell."""
        sys.stdout.flush()
        sys.stderr.flush()
        lifeline, self._lifeline = os.pipe()
        self._told, telling = os.pipe()
        with _blocked():  # until each side handles signals in its own way
            self._child = os.fork()
            if self._child:
                os.close(lifeline)
                os.close(telling)
                for number in self._handlers:
                    signal.signal(number, self._pass_on)
                return None
            os.close(self._lifeline)
            os.close(self._told)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal_at_end(lifeline, os.getpid(), signal.SIGKILL, is_group=False)
            if select.select([lifeline], [], [], 0)[0]:
                os._exit(1)  # the guard was gone before the kernel knew

        def tell(begun: Begun) -> None:
            os.write(telling, msgspec.json.encode(begun))

        return tell

    def _pass_on(self, number: int, frame: Any) -> None:
        self._stops = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, PASSED_ON + number)

    def wait(self) -> int:
        """Returns the child's exit code. Raises _Lost when it was killed."""
        _, status = os.waitpid(self._child, 0)
        code = os.waitstatus_to_exitcode(status)
        with os.fdopen(self._told, "rb") as file:
            told = file.read()
        os.close(self._lifeline)
        if code >= 0:
            return code
        if self._stops:
            return 128 - code
        raise _Lost(-code, msgspec.json.decode(told, type=Begun) if told else None)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Keeps back the signals that end a run, until the block is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_WITHIN_S)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
