"""Reads a run's configuration, its checkpoints and its weights, and tells a run that goes on to
save its state, or to end.

A run says in ``logs/processes.json`` who supervises it. So it is asked on the machine that it was
started on; on another one it counts as not running. ``run_goes_on`` holds between two attempts of a
run, too.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gcore_core.contract.run_files import CONFIG, LOGS, SAVE
from gcore_core.node.process_record import (
    RECORD,
    StartedProcess,
    identify_process,
    is_running,
)
from gcore_core.run.manifest import NAME as CHECKPOINT_NAME
from gcore_core.run.manifest import Manifest
from gcore_core.run.manifest import inspect as inspect_checkpoint
from gcore_core.run.saved_weights import check_weights, weights_sha256
from gcore_core.run.supervised import run_goes_on

if TYPE_CHECKING:
    from gcore_core.config.plan import Plan

__all__ = [
    "CHECKPOINT_NAME",
    "Manifest",
    "ask_to_save",
    "ask_to_stop",
    "check_weights",
    "inspect_checkpoint",
    "is_alive",
    "open_checkpoint",
    "read_config",
    "read_settings",
    "run_goes_on",
    "saved_plan",
    "saved_steps",
    "weights_sha256",
]


class _SupervisorRecord(msgspec.Struct):
    """What is read of the record of a run's processes."""

    supervisor: StartedProcess | None = None


def read_config(run_dir: Path) -> dict[str, Any]:
    """Returns the resolved configuration of a run, as plain values.

    Raises OSError where there is none, and ConfigError for one that is broken.
    """
    from gcore_core.config.yaml_source import read_written

    return read_written(run_dir / CONFIG)


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Returns dotted key -> value of the resolved configuration of a run.

    An empty section is an empty mapping. Raises what ``read_config`` raises.
    """
    from gcore_core.config.yaml_source import flat

    return flat(read_config(run_dir))


def saved_steps(run_dir: Path) -> list[int]:
    """Returns the steps that a run has checkpoints of, in order."""
    from gcore_core.run.checkpoints import Checkpoints

    return Checkpoints(run_dir).steps()


def open_checkpoint(run_dir: Path, step: int) -> Path:
    """Returns the directory of a checkpoint; raises CheckpointError unless it is whole."""
    from gcore_core.run.checkpoints import Checkpoints

    return Checkpoints(run_dir).open(step).path


def saved_plan(checkpoint: Path) -> Plan:
    """Returns the plan of the run as it was when it saved a checkpoint.

    The run may have gone on with other settings since, and with them its trainer would write other
    weights than were saved.
    """
    from gcore_core.config.plan import load_plan
    from gcore_core.config.yaml_source import written
    from gcore_core.run.checkpoint_service import saved_config

    with tempfile.TemporaryDirectory(prefix="g-core-") as folder:
        file = Path(folder) / CONFIG
        file.write_text(written(saved_config(checkpoint)), encoding="utf-8")
        return load_plan(file)


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
