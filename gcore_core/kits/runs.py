"""Reads a run's configuration, its checkpoints and its weights.

``run_goes_on`` says whether a run does, on the machine that it was started on; it holds between two
attempts of a run, too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_core.contract.run_files import CONFIG
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
    "check_weights",
    "inspect_checkpoint",
    "open_checkpoint",
    "read_config",
    "read_settings",
    "run_goes_on",
    "saved_plan",
    "saved_steps",
    "weights_sha256",
]


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
