"""Runs the quickstart as a person does, for the benchmarks that measure its runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore_core.contract.run_files import read_metrics
from gcore_core.run.make_model import make_model

RECIPE = Path(__file__).parents[1] / "recipes/quickstart.yaml"


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of all processes: one thread each, and a cache in ``folder``."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "G_CORE_CACHE": str(folder / "cache"),
    }
    return {**os.environ, **settings}


def overrides_of(seed: int, directory: Path) -> list[str]:
    """Returns the overrides of the recipe for a seed: of the run, and of the model it begins with.

    directory: that of the run.
    """
    return [
        f"run.seed={seed}",
        f"run.dir={directory}",
        f"roles.policy.model.make.config.seed={seed}",
    ]


def make_policy(plan: dict[str, Any], folder: Path) -> Path:
    """Makes the model that the policy begins with, where runs look for it; returns its directory.

    plan: the recipe as resolved.
    folder: that of ``environment``.
    """
    make = plan["roles"]["policy"]["model"]["make"]
    return make_model(make, folder / "cache/models", lambda *_: None)


def start(
    arguments: Sequence[str], folder: Path, log: Path, *, own_session: bool = False
) -> subprocess.Popen[bytes]:
    """Starts ``g-core`` with these arguments; what it prints is added to ``log``.

    folder: that of ``environment``.
    own_session: whether all of its processes can be killed as one process group.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "gcore_core", *arguments],
            env=environment(folder),
            stdout=output,
            stderr=output,
            start_new_session=own_session,
        )


def require_success(process: subprocess.Popen[bytes], arguments: Sequence[str], log: Path) -> None:
    """Waits for a process, and ends the benchmark with the end of its log when it fails."""
    if process.wait():
        text = f"g-core {' '.join(arguments)} ended with {process.returncode}"
        sys.exit(f"{text}:\n{log.read_text()[-2000:]}")


def finished_rows(directory: Path, steps: int) -> list[dict[str, Any]]:
    """Returns the metrics of a run, by step; ends the benchmark unless it took all its steps."""
    rows = read_metrics(directory)
    if rows[-1]["step"] != steps:
        sys.exit(f"{directory} ended at step {rows[-1]['step']} of {steps}")
    return rows


def wall_s(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the seconds from the end of the first step to the end of the last.

    rows: those of ``finished_rows``; the first is of the time before the first step.
    """
    return float(rows[-1]["time_unix_s"] - rows[1]["time_unix_s"])
