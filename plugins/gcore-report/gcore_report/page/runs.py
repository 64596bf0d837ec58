"""Opens the directories of runs for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.kits.runs import read_config

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """Reads one run, each of its files at most once.

    directory: the run's, absolute, links resolved.
    label: how the page calls it, different for each of the runs that are shown together.
    """

    directory: Path
    label: str

    @cached_property
    def rows(self) -> Rows:
        """Returns the rows of ``metrics.jsonl``, as ``read_metrics`` does."""
        return run_files.read_metrics(self.directory)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Returns the resolved configuration; empty where it cannot be read."""
        try:
            return read_config(self.directory)
        except (OSError, ConfigError):
            return {}

    @property
    def steps(self) -> int:
        """Returns how many steps the run is to make; 0 where that is not known."""
        steps = self.config.get("run", {}).get("steps")
        return steps if isinstance(steps, int) else 0

    def sampled_steps(self) -> list[int]:
        """Returns the steps that have a file of evaluated answers, in order."""
        files = (self.directory / run_files.SAMPLES).glob("step_*.jsonl")
        numbers = (file.stem.removeprefix("step_") for file in files)
        return sorted(int(number) for number in numbers if number.isdecimal())


def open_runs(directories: Sequence[Path]) -> list[Run]:
    """Opens runs, and names each so that no two have the same name.

    Raises DataError for a directory that is no run's.
    """
    resolved = [_resolved(directory) for directory in directories]
    labels = [f"{path.parent.name}/{path.name}" for path in resolved]
    if len(set(labels)) < len(labels):
        labels = [str(path) for path in resolved]
    return [Run(path, label) for path, label in zip(resolved, labels, strict=True)]


def _resolved(directory: Path) -> Path:
    path = directory.expanduser().resolve()
    if not any((path / name).exists() for name in (run_files.METRICS, run_files.CONFIG)):
        raise DataError(
            "there is no run here.",
            where=str(directory),
            why=f"it has neither {run_files.METRICS} nor {run_files.CONFIG}",
            todo="give the directory of a run, such as runs/quickstart/latest",
        )
    return path


def facts_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns what the head of the page says of each run."""
    return [
        {
            "label": run.label,
            "directory": str(run.directory),
            "steps": run.steps,
            "finished": run.rows[-1]["step"] if run.rows else 0,
            "start_unix_s": run.rows[0]["time_unix_s"] if run.rows else 0,
            "end_unix_s": run.rows[-1]["time_unix_s"] if run.rows else 0,
        }
        for run in runs
    ]
