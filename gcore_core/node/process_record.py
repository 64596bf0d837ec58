"""Writes down what a node agent has started, so that somebody can clear up after one that is lost.

The agent holds a ``ProcessRecord``, a file in the directory of logs. It is gone when the agent has
ended its workers itself. Else somebody calls ``clear_up`` with that file: what ends the run, the
next agent of the same run, or what a launcher has put on another machine than the run's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gcore_core.runtime.files import replacing

log = logging.getLogger(__name__)
RECORD = "processes.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDS_S = 5.0  # an agent that is alone ends by itself; it has so long
# Killed processes have so long to be gone, with the memory and devices they held.
_WAIT_S = 5.0


class StartedProcess(msgspec.Struct, frozen=True):
    """Identifies a process that leads a group.

    start_ticks: when it started, in clock ticks since boot; another process that has its pid later
        has another start.
    """

    pid: int
    start_ticks: int


class SharedFile(msgspec.Struct, frozen=True):
    """Identifies a file or directory; another one that has its name later has another inode."""

    path: str
    device: int
    inode: int

    def remove(self) -> None:
        """Removes the file, or the directory with all in it, if it is still the same."""
        with contextlib.suppress(OSError):
            if identify(self.path) == self:
                if os.path.isdir(self.path):
                    shutil.rmtree(self.path)
                else:
                    os.unlink(self.path)
                log.info("%s is removed", self.path)


def identify(path: str) -> SharedFile:
    """Returns what identifies the file at ``path``. Raises OSError when there is none."""
    status = os.lstat(path)
    return SharedFile(path, status.st_dev, status.st_ino)


class _Contents(msgspec.Struct, kw_only=True):
    """Holds what is in the file.

    boot: the start of the machine that the ticks are counted from.
    supervisor: the process whose agent wrote it; while it lives it clears up by itself.
    files: what workers have made in shared memory.
    directories: the agent's own, such as for slabs and sockets.
    """

    boot: str
    supervisor: StartedProcess | None
    agent: StartedProcess | None
    workers: dict[str, StartedProcess] = {}
    files: list[SharedFile] = []
    directories: list[SharedFile] = []


class ProcessRecord:
    """Keeps the file up to date. Nothing is written without a path.

    path: of the file; "" for none.
    directories: those that the agent removes when it ends, such as its slabs'.
    is_remote: the supervisor is on another machine, so whether it lives cannot be seen here. The
        next agent of the run on this machine was started by who has taken its place.
    """

    def __init__(
        self, path: str, directories: Iterable[str] = (), *, is_remote: bool = False
    ) -> None:
        self._path = Path(path) if path else None
        self._contents = _Contents(
            boot=_boot_id(),
            supervisor=None if is_remote else identify_process(os.getppid()),
            agent=identify_process(os.getpid()),
            directories=[identify(path) for path in directories if os.path.isdir(path)],
        )
        self._write()

    def started(self, name: str, pid: int) -> None:
        """Notes a worker that was started."""
        process = identify_process(pid)
        if process is not None:
            self._contents.workers[name] = process
            self._write()

    def ended(self, name: str) -> None:
        """Forgets a worker that has ended, with its group."""
        if self._contents.workers.pop(name, None) is not None:
            self._write()

    def hold_files(self, files: list[SharedFile]) -> None:
        """Notes the files that workers have made, in place of those noted before."""
        if files != self._contents.files:
            self._contents.files = files
            self._write()

    def close(self) -> None:
        """Removes the file: nothing is left to clear up."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            with replacing(self._path) as fresh:
                fresh.write_bytes(msgspec.json.encode(self._contents))
        except OSError as error:  # a full disk ends no run
            log.warning("%s cannot be written: %s", self._path, error.strerror)


def clear_up(path: Path, agent: StartedProcess | None = None) -> int:
    """Ends what a lost agent has left: its processes, then their files, then its record.

    A process is killed only if it is still the one that was written down. Where the machine was
    started again since, its processes are gone, and only the record is removed.

    path: of the agent's record.
    agent: only what this one has written down is touched; None: what any has. The record may be
        that of a later agent of the same name.

    Returns 0, or the pid of a supervisor:

        there is no record, or none that can be read    0: there is nothing to clear up
        it is another agent's                           0: nothing was touched
        its supervisor lives, and is another process    its pid: the run goes on, so nothing was
                                                        touched
        else                                            0: all is cleared up
    """
    try:
        contents = msgspec.json.decode(path.read_bytes(), type=_Contents)
    except (OSError, msgspec.DecodeError):
        return 0
    if agent is not None and contents.agent != agent:
        return 0
    if contents.boot == _boot_id():
        supervisor = contents.supervisor
        is_other = supervisor != identify_process(os.getpid())
        if supervisor is not None and is_other and is_running(supervisor):
            return supervisor.pid
        # The agent ends its workers and removes its store when it is alone. One that hangs is
        # killed first: it would start its workers again.
        _wait_for(contents.agent)
        for process in filter(None, [contents.agent, *contents.workers.values()]):
            _kill_group(process)
        for file in [*contents.files, *contents.directories]:
            file.remove()
    path.unlink(missing_ok=True)
    return 0


def _wait_for(process: StartedProcess | None) -> None:
    """Waits for a process to end by itself, if it is still the one that was written down."""
    with contextlib.suppress(ProcessLookupError):
        if process is None:
            return
        handle = os.pidfd_open(process.pid)
        try:
            if identify_process(process.pid) == process:
                _wait_for_end(handle, _ENDS_S)
        finally:
            os.close(handle)


def _wait_for_end(handle: int, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(timeout_s * 1000)


def _kill_group(process: StartedProcess) -> None:
    """Kills a process with its group, and waits until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        # The pid stays this process's while it is compared.
        handle = os.pidfd_open(process.pid)
        try:
            if identify_process(process.pid) != process:
                return
            os.killpg(process.pid, signal.SIGKILL)
            log.info("process %s was left behind and is killed", process.pid)
            _wait_for_end(handle, _WAIT_S)
        finally:
            os.close(handle)


def is_running(process: StartedProcess | None) -> bool:
    """Says whether a process is still the one that was written down, and has not ended."""
    return (
        process is not None
        and identify_process(process.pid) == process
        and _status(process.pid)[:1] not in (["Z"], ["X"])  # it has ended
    )


def identify_process(pid: int) -> StartedProcess | None:
    """Identifies a process; None for one that is gone, or where there is no /proc."""
    fields = _status(pid)
    return StartedProcess(pid, int(fields[19])) if fields else None


def _status(pid: int) -> list[str]:
    """Returns the fields of a process from its state on; the 20th is its start, in ticks."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # before it is the name, which may hold blanks


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
