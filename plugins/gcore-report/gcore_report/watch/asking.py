"""Tells a run that goes on to save its state, or to end.

A run says in ``logs/processes.json`` who supervises it. So it is asked on the machine that it was
started on; on another one it counts as not running.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from gcore_core.contract.run_files import LOGS, SAVE
from gcore_core.kits.processes import RECORD, StartedProcess, identify_process, is_running


class _SupervisorRecord(msgspec.Struct):
    """What is read of the record of a run's processes."""

    supervisor: StartedProcess | None = None


def is_alive(run_dir: Path) -> bool:
    """Returns whether the run's supervisor runs, on this machine."""
    return is_running(_supervisor(run_dir))


def ask_to_save(run_dir: Path) -> bool:
    """Asks a run for a checkpoint at the end of its next step; returns whether it runs.

    Raises OSError where its directory cannot be written.
    """
    if not is_alive(run_dir):
        return False
    (run_dir / SAVE).touch()
    return True


def ask_to_stop(run_dir: Path) -> bool:
    """Asks a run to save its state and to end, as SIGTERM does; returns whether it runs."""
    supervisor = _supervisor(run_dir)
    if supervisor is None:
        return False
    try:
        # The pid stays this process's while it is compared.
        handle = os.pidfd_open(supervisor.pid)
    except ProcessLookupError:
        return False
    try:
        if identify_process(supervisor.pid) != supervisor:
            return False
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _supervisor(run_dir: Path) -> StartedProcess | None:
    """Returns the process that supervises a run, as its record says; None without one."""
    try:
        content = (run_dir / LOGS / RECORD).read_bytes()
        return msgspec.json.decode(content, type=_SupervisorRecord).supervisor
    except (OSError, msgspec.MsgspecError):
        return None
