"""Lets one process at a time supervise a run, and says whether one does.

The supervisor holds a lock on a file of the run, which ends with it, however it ends. On a disk
that machines share, the lock holds between them where the disk has locks, as NFS does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.run_files import LOGS

log = logging.getLogger(__name__)
FILE = "supervisor.pid"
_LOOK_S = 0.01
_ASKED_S = 0.1  # who asks whether a run goes on holds the lock for a moment


@contextlib.contextmanager
def hold_run(run_dir: Path, within_s: float = _ASKED_S) -> Iterator[None]:
    """Says that this process supervises the run, until the block is left or the process ends.

    within_s: so long another one, which was killed or ends, may still have it.

    Raises ConfigError where another process supervises the run.
    """
    path = run_dir / LOGS / FILE
    never_ran = not path.parent.exists()
    try:
        path.parent.mkdir(exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise ConfigError(
            "the run cannot be supervised from here.",
            where=str(run_dir),
            why=f"the system says: {error.strerror} ({error.filename})",
            todo="go on as the user, and on a disk, that may write there",
        ) from error
    with file:
        until_s = time.monotonic() + within_s
        while not _has_lock(file.fileno()):
            if time.monotonic() > until_s:
                raise goes_on_already(run_dir, os.pread(file.fileno(), 1000, 0).decode())
            time.sleep(_LOOK_S)
        with contextlib.suppress(OSError):  # a full disk: nobody else is told who it is
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            if never_ran and [entry.name for entry in path.parent.iterdir()] == [FILE]:
                shutil.rmtree(path.parent)  # what was refused at once leaves nothing


def _has_lock(file: int) -> bool:
    """Whether this process alone has the lock on an open file; True on a disk without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("a second process that goes on with the run is not seen: %s", error)
    return True


def goes_on_already(run_dir: Path, who: str) -> ConfigError:
    """Returns the error for a run that another process supervises.

    who: its pid, and its machine where that may be another one; "" where that is not known.
    """
    todo = "wait for its end"
    if who:
        todo += f"; or have it save its state and end: kill {who.partition(' ')[0]}"
    return ConfigError(
        "this run goes on already.",
        where=str(run_dir),
        why=f"{f'process {who}' if who else 'another process'} supervises it",
        todo=todo,
    )


def run_goes_on(run_dir: Path) -> bool:
    """Whether the run's supervisor lives, on this machine or on one that shares the disk."""
    try:
        with (run_dir / LOGS / FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
