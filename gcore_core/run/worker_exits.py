"""Says how a worker ended, and whether it is started again in vain.

A generator, scorer or annotator that is lost is started again, and the step goes on. What kills it
may kill the next process, too: a request on which its engine crashes, or a wait that never ends.
So the supervisor counts, for each worker, the processes in a row that answered nothing.
"""

from __future__ import annotations

from pathlib import Path

from gcore_core.contract.errors import WorkerDied
from gcore_core.run.signals import signal_name
from gcore_core.runtime.messages import RESTART_EXIT_CODE, WorkerExit

#: A worker is started again so often in a row, while it answers nothing.
RESTARTS_IN_VAIN = 5
_LOG_LINES = 3  # of a worker's log, in the error
#: So begins a stack that a process that hung has written to its log; a person reads it there.
_STACKS = ("Thread 0x", "Current thread 0x")


class Restarts:
    """Counts the restarts of each worker since it last answered a request."""

    def __init__(self) -> None:
        self._in_vain: dict[str, int] = {}
        # Worker -> how it was found to hang, the last time.
        self._hung: dict[str, str] = {}

    def answered(self, worker: str) -> None:
        """A process that took a lost one's place has answered its first request."""
        self._in_vain.pop(worker, None)

    def step_ended(self) -> None:
        """The step that was being made has ended, so whatever happened in it was not in vain."""
        self._in_vain.clear()

    def hung(self, worker: str, waiter: str, what: str) -> None:
        """A worker is killed, since it does not answer in time."""
        self._hung[worker] = f"{waiter} waited for it: {what}"

    def ended(self, exited: WorkerExit, reason: str, log_file: Path) -> WorkerDied | None:
        """Counts an exit after which the worker is started again.

        Returns the error to raise where that has been in vain too often, else None.

        reason: how it ended, such as "ended with signal SIGKILL".
        """
        name = exited.name
        hung = self._hung.pop(name, "")
        # The first exit of a row is that of a process which may have answered. So the exit number
        # RESTARTS_IN_VAIN + 1 is the first after that many restarts in vain.
        count = self._in_vain[name] = self._in_vain.get(name, 0) + 1
        if count <= RESTARTS_IN_VAIN:
            return None
        why = [hung or exited.running or f"the last time it {reason}", *_last_lines(exited.tail)]
        return WorkerDied(
            f"it was started again {RESTARTS_IN_VAIN} times in a row and has answered no request",
            where=name,
            why="\n".join(why),
            todo=f"its log: {log_file}",
            process=name,
            pid=exited.pid,
            code=exited.code,
        )


def _last_lines(tail: str) -> list[str]:
    """Returns the last lines of a log, without the stacks at its end."""
    lines: list[str] = []
    for line in tail.splitlines():
        if line.startswith(_STACKS):
            break
        if line.strip():
            lines.append(line)
    return lines[-_LOG_LINES:]


def last_error(exited: WorkerExit) -> str:
    """Returns the last error that a worker logged before it asked to be started again.

    It is empty for a worker that ended otherwise.
    """
    if exited.code != RESTART_EXIT_CODE:
        return ""
    parts = [line.partition(f" {exited.name} ERROR ") for line in exited.tail.splitlines()]
    return next((message for _, is_error, message in reversed(parts) if is_error), "")


def exit_text(code: int) -> str:
    return f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"
