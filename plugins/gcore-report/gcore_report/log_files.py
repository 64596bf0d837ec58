"""Finds the logs of a run."""

from __future__ import annotations

from pathlib import Path

from gcore_core.contract.errors import DataError, did_you_mean
from gcore_core.contract.run_files import LOGS

SUPERVISOR = "supervisor"


def find_logs(run_dir: Path) -> dict[str, Path]:
    """Returns process -> its log, the supervisor's first. Raises DataError where there are none."""
    paths = {path.stem: path for path in sorted((run_dir / LOGS).glob("*.log"), key=_order)}
    if not paths:
        raise DataError(
            "there are no logs here.",
            where=str(run_dir),
            why=f"a run has them in {LOGS}/",
            todo="name a run's directory, such as runs/<name>/<NNN> or runs/<name>/latest",
        )
    return paths


def _order(path: Path) -> tuple[bool, str, int]:
    """Sorts processes by name, and those of one role by number."""
    role, _, number = path.stem.rpartition(".")
    if not number.isdecimal():
        return path.stem != SUPERVISOR, path.stem, 0
    return True, role, int(number)


def pick_logs(logs: dict[str, Path], name: str, run_dir: Path) -> dict[str, Path]:
    """Returns the log of a process, or else those of all whose names begin so.

    Raises DataError where there is none.
    """
    if name in logs:
        return {name: logs[name]}
    picked = {process: path for process, path in logs.items() if process.startswith(name)}
    if not picked:
        raise DataError(
            f"no process of the run is called {name!r}{did_you_mean(name, list(logs))}.",
            where=str(run_dir),
            why=f"there are: {', '.join(logs)}",
            todo="name one of them, or the beginning of its name",
        )
    return picked
