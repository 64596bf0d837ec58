"""Starts the supervisor as a child, and again from the newest checkpoint when it is killed.

``g-core run`` is two processes. The first one does nothing but wait: what looks for memory to
free, or kills what has a large log, does not find it. The second one is the supervisor. Signals
that only the first one gets are passed on; when the first one is killed, the second one is too.

The node agent ends with its supervisor, and the next one starts another.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import WorkerDied
from gcore_core.contract.run_files import CONFIG
from gcore_core.node.spawn import signal_at_end
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.signals import PASSED_ON, SAVE_WITHIN_S, signal_name


@dataclass(frozen=True, kw_only=True)
class Start:
    """Says what a supervisor is to run.

    file: the job.
    overrides: words ``key=value`` that win over it.
    resume: the directory of a run that goes on; None: a new one.
    restarts: how often the run may still go on by itself, where it does so now; None: a person
        starts it, so ``checkpoint.restarts`` says it.
    """

    file: Path
    overrides: Sequence[str] = ()
    resume: Path | None = None
    restarts: int | None = None


class Begun(msgspec.Struct, frozen=True, tag=True):
    """Is what the supervisor tells as soon as it knows it.

    directory: the run's.
    restarts: how often the run may still go on by itself.
    """

    directory: str
    restarts: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """A process was lost, and the run goes on by itself."""


class Over(msgspec.Struct, frozen=True, tag=True):
    """Comes last, when the supervisor's work has ended, well or not."""


class StarterLink:
    """Is the starter as its supervisor sees it."""

    def __init__(self, telling: int) -> None:
        """telling: the file that ``tell`` writes to."""
        self._telling = telling

    def tell(self, message: Begun | Lost | Over) -> None:
        os.write(self._telling, msgspec.json.encode(message) + b"\n")


#: Runs a job to its end, as the supervisor.
Supervise = Callable[[Start, StarterLink], int]


class _Killed(Exception):
    """The supervisor was killed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def with_restarts(start: Start, supervise: Supervise) -> int:
    """Runs ``supervise`` in a child process and returns its exit code; in the child, its result.

    A child that is killed is replaced by one that goes on from the run's newest checkpoint, as
    often as ``checkpoint.restarts`` says: what the supervisor has restarted by itself counts, too.
    Raises WorkerDied when that is not possible, or when the child's process was ended before its
    work; and what ``supervise`` raises in the child alone.
    """
    starter = _Starter()
    while True:
        link = starter.fork()
        if link is not None:
            return _supervised(supervise, start, link)
        try:
            return starter.wait()
        except _Killed as killed:
            start = starter.next_start(killed.number)
            print(
                f"the supervisor ended with signal {signal_name(killed.number)}; it is started "
                "again",
                flush=True,
            )


def _supervised(supervise: Supervise, start: Start, link: StarterLink) -> int:
    """Runs ``supervise`` in the child, and tells the starter when that has ended."""
    child = os.getpid()
    try:
        return supervise(start, link)
    finally:
        if os.getpid() == child:  # else it is one that a function of the user has forked
            link.tell(Over())


def _where(begun: Begun | None) -> str:
    return "" if begun is None else f"the run is in {begun.directory}"


def _ended_by_a_call(code: int, begun: Begun | None) -> WorkerDied:
    """Makes the error for a supervisor that was ended in the middle of its work."""
    todo = (
        "have it raise an error instead; launcher: {use: core/local} gives rewards and roles "
        "processes of their own, and its errors name them"
    )
    return WorkerDied(
        f"its process was ended with exit code {code} before the run was over",
        where="supervisor",
        why="code of the job or of a plugin has called os._exit, or a library has ended the "
        "process\nwith launcher core/inline rewards, roles and data all run in this process",
        todo=f"{todo}\n{_where(begun)}".rstrip(),
        process="supervisor",
        code=code,
    )


class _Starter:
    """Holds the present child, and the signals that ask the run to end."""

    def __init__(self) -> None:
        self._child = 0  # pid of the child; 0 while there is none
        self._lifeline = -1  # writing end of a pipe: when it closes, the child is killed
        self._told = -1  # a file in memory, in which the child tells; a pipe may be full
        self._begun: Begun | None = None  # None: nothing was told yet
        self._restarts = 0  # that are left
        self._stop = 0  # the signal that asked last; 0: none has
        # One that this process ignores stays ignored.
        self._handlers = {
            number: handler
            for number in SAVE_WITHIN_S
            if (handler := signal.getsignal(number)) != signal.SIG_IGN
        }

    def fork(self) -> StarterLink | None:
        """Starts a child. Returns None here, and in the child its link to this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        lifeline, self._lifeline = os.pipe()
        self._told = os.memfd_create("told")
        with _blocked():  # until each side handles signals in its own way
            if self._stop:  # it came while there was no child
                sys.exit(128 + self._stop)
            self._child = os.fork()
            if self._child:
                os.close(lifeline)
                for number in self._handlers:
                    signal.signal(number, self._pass_on)
                return None
            os.close(self._lifeline)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal_at_end(lifeline, os.getpid(), signal.SIGKILL, is_group=False)
            if select.select([lifeline], [], [], 0)[0]:
                os._exit(1)  # the starter was gone before the kernel knew

        return StarterLink(self._told)

    def _pass_on(self, number: int, frame: Any) -> None:
        self._stop = number
        if self._child:  # its number is its own until it was waited for
            os.kill(self._child, PASSED_ON + number)

    def wait(self) -> int:
        """Returns the child's exit code.

        Raises _Killed when it was killed, and WorkerDied when a call ended it before its work.
        """
        os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
        # No signal goes to the child's number when somebody else may have it.
        with _blocked():
            _, status = os.waitpid(self._child, 0)
            self._child = 0
        code = os.waitstatus_to_exitcode(status)
        with os.fdopen(self._told, "rb") as file:
            file.seek(0)
            told = file.read()
        os.close(self._lifeline)
        is_over = self._take(told)
        if code >= 0:
            # One that hangs when a signal has asked it to end leaves by a call of its own.
            if not is_over and code - 128 not in self._handlers:
                raise _ended_by_a_call(code, self._begun)
            return code
        if self._stop:
            # One that was passed on before the child could handle it has killed it.
            passed_on = -code - PASSED_ON
            return 128 + (passed_on if passed_on in self._handlers else -code)
        raise _Killed(-code)

    def _take(self, told: bytes) -> bool:
        """Takes what a child has told; returns whether its work has ended."""
        is_over = False
        for line in told.splitlines():
            match msgspec.json.decode(line, type=Begun | Lost | Over):
                case Begun() as begun:
                    self._begun = begun
                    self._restarts = begun.restarts
                case Lost():
                    self._restarts -= 1
                case Over():
                    is_over = True
        return is_over

    def next_start(self, number: int) -> Start:
        """Returns how a run goes on whose supervisor a signal has killed.

        Raises WorkerDied where it cannot.
        """
        if self._begun is not None:
            directory = Path(self._begun.directory)
            saved_steps = Checkpoints(directory).steps()
            if self._restarts and saved_steps:
                self._restarts -= 1
                return Start(file=directory / CONFIG, resume=directory, restarts=self._restarts)
        raise WorkerDied(
            f"ended with signal {signal_name(number)}",
            where="supervisor",
            why="there is no checkpoint to go on from, or checkpoint.restarts are used up",
            todo=_where(self._begun),
            process="supervisor",
        ) from None


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Keeps back the signals that end a run, until the block is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_WITHIN_S)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
