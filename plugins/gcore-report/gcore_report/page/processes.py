"""Makes the panels about processes: work by rank, memory, and when each process was there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore_report.page import limits
from gcore_report.page.curves import rounded
from gcore_report.page.runs import Run

_CPU = "cpu_seconds/"
_MEMORY = "memory_mib/"

BALANCE_RULE = (
    "Processor seconds that each process used in a step. Ranks of one role that are even have the "
    f"same colour in a column. Of more than {limits.MAP_COLUMNS} steps a column is a mean."
)
MEMORY_RULE = "The largest resident memory of each process so far, as the system counts it."


def balance(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns processor seconds of each process in each step, by run."""
    return {"runs": [_work(run) for run in runs], "rule": BALANCE_RULE}


def _work(run: Run) -> dict[str, Any]:
    """Returns the work of one run: ``z`` is [processes][columns], None where nothing is known."""
    steps, names, table = _table(run.rows, _CPU)
    if len(steps) < 2:
        return {"label": run.label, "x": [], "y": [], "z": []}
    used = np.diff(table, axis=1)
    used[used < 0] = np.nan  # a process that was started anew counts from 0
    columns, x = _columns(used, np.array(steps[1:]))
    return {"label": run.label, "x": x, "y": names, "z": _plain(columns)}


def memory(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the memory of each process in the last step that says it, by run."""
    found = []
    for run in runs:
        steps, names, table = _table(run.rows, _MEMORY)
        largest = np.nanmax(table, axis=1) if steps else np.zeros(0)
        found.append({"label": run.label, "processes": names, "mib": rounded(largest)})
    return {"runs": found, "rule": MEMORY_RULE}


def lives(run: Run) -> list[list[Any]]:
    """Returns [process, first step, last step] of every process that metrics name."""
    steps, names, table = _table(run.rows, _CPU)
    found = []
    for name, row in zip(names, table, strict=True):
        seen = np.flatnonzero(np.isfinite(row))
        found.append([name, steps[seen[0]], steps[seen[-1]]])
    return found


def _table(
    rows: Sequence[Mapping[str, Any]], prefix: str
) -> tuple[list[int], list[str], np.ndarray]:
    """Returns the steps, the processes and their values, float64[processes, steps]."""
    known = [row for row in rows if any(key.startswith(prefix) for key in row["metrics"])]
    keys = dict.fromkeys(key for row in known for key in row["metrics"] if key.startswith(prefix))
    names = sorted((key.removeprefix(prefix) for key in keys), key=_natural)
    table = np.full((len(names), len(known)), np.nan)
    for column, row in enumerate(known):
        for place, name in enumerate(names):
            table[place, column] = row["metrics"].get(prefix + name, np.nan)
    return [row["step"] for row in known], names, table


def _natural(name: str) -> tuple[str, int]:
    """Sorts ``policy.10`` behind ``policy.9``."""
    role, _, number = name.rpartition(".")
    return (role, int(number)) if number.isdecimal() else (name, 0)


def _columns(table: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Returns at most ``MAP_COLUMNS`` columns, each the mean of neighbours, and their steps."""
    if len(steps) <= limits.MAP_COLUMNS:
        return table, [float(step) for step in steps]
    parts = np.array_split(np.arange(len(steps)), limits.MAP_COLUMNS)
    means = np.stack([_mean(table[:, part]) for part in parts], axis=1)
    return means, [float(steps[part].mean()) for part in parts]


def _mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each row over what is known, nan where nothing is."""
    known = np.isfinite(values)
    sums = np.where(known, values, 0.0).sum(axis=1)
    counts = known.sum(axis=1)
    means = np.full(len(values), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _plain(table: np.ndarray) -> list[list[float | None]]:
    return [[float(f"{x:.4g}") if np.isfinite(x) else None for x in row] for row in table]
