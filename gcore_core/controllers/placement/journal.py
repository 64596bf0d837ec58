"""Writes ``placement.jsonl`` of a run: one JSON object a line.

A line holds what was decided before a step, or what a decision came to.
``gcore_core.contract.run_files`` has the types of the lines and reads them.
"""

from __future__ import annotations

from pathlib import Path

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.errors import DataError
from gcore_core.contract.placement import Decision, Partition
from gcore_core.contract.run_files import PLACEMENT, Decided, read_placement


def decided(step: int, decision: Decision, took_s: float = 0.0, rescued: str = "") -> Decided:
    """Returns the journal's line for a decision.

    step: the step that begins with the decision.
    decision: its ``state`` and ``seen`` must be plain values.
    took_s: seconds that the decision took, including the summary of what the policy sees.
    rescued: the judge that the decision helps; "" for a decision at a step's boundary.
    """
    plain = {
        name: value
        for name, value in vars(decision).items()
        if name not in ("partition", "engines")
    }
    engines = None if decision.engines is None else _indexes(decision.engines)
    plain |= {"cells": _indexes(decision.partition), "engines": engines, "rescued": rescued}
    return Decided(step=step, took_s=took_s, **plain)


def _indexes(partition: Partition) -> dict[str, list[list[int]]]:
    """Returns role -> the device indexes of each of its cells."""
    return {
        role: [[device.index for device in cell.devices] for cell in cells]
        for role, cells in partition.cells.items()
    }


def profiles_of_earlier_run(directory: Path) -> dict[str, Profile]:
    """Returns role -> the last profile that an earlier run of the same name has fitted.

    It is the latest run before this one, in ``runs/<name>/<NNN>``, that has fitted any.
    Returns {} where there is none, and for a directory that is not numbered: what lies beside that
    are not runs of this name.

    directory: that of this run.
    """
    if not directory.name.isdecimal():
        return {}
    numbers = {
        int(path.parent.name): path.parent
        for path in directory.parent.glob(f"[0-9]*/{PLACEMENT}")
        if path.parent.name.isdecimal()
    }
    for number in sorted(numbers, reverse=True):
        if number >= int(directory.name):
            continue
        try:
            outcomes = read_placement(numbers[number])[1]
        except DataError:  # of another version, or damaged: a prior is not worth an error
            continue
        for step in sorted(outcomes, reverse=True):
            if fits := outcomes[step].engines:
                return {role: fit.profile for role, fit in fits.items() if fit.requests}
    return {}
