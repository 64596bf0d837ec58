"""Writes ``placement.jsonl`` of a run: one JSON object a line.

A line holds what was decided before a step, or what a decision came to.
``gcore_core.contract.run_files`` has the types of the lines and reads them.
"""

from __future__ import annotations

from gcore_core.contract.placement import Decision, Partition
from gcore_core.contract.run_files import Decided


def decided(step: int, decision: Decision, took_s: float = 0.0, rescued: str = "") -> Decided:
    """Returns the journal's line for a decision.

    step: the step that begins with the decision.
    decision: its ``state`` and ``seen`` must be plain values. Its ``account`` is of the rollout
        before, and goes to the line of what that came to.
    took_s: seconds that the decision took, including the summary of what the policy sees.
    rescued: the judge that the decision helps; "" for a decision at a step's boundary.
    """
    plain = {
        name: value
        for name, value in vars(decision).items()
        if name not in ("partition", "engines", "account")
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
