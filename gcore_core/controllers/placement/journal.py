"""Writes ``placement.jsonl`` of a run: what was decided before each step, what it came to; one JSON
object a line.

``gcore_core.contract.run_files`` has the types of the lines and reads them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gcore_core.contract.placement import Decision, Partition
from gcore_core.contract.run_files import PLACEMENT, Decided, Measured


def decided(step: int, decision: Decision, took_s: float = 0.0, rescued: str = "") -> Decided:
    """What is written of a decision. ``state`` and ``seen`` must be plain values."""
    plain = {
        name: told for name, told in vars(decision).items() if name not in ("partition", "engines")
    }
    engines = None if decision.engines is None else _indexes(decision.engines)
    plain |= {"cells": _indexes(decision.partition), "engines": engines, "rescued": rescued}
    return Decided(step=step, took_s=took_s, **plain)


def _indexes(partition: Partition) -> dict[str, list[list[int]]]:
    return {
        role: [[device.index for device in cell.devices] for cell in own]
        for role, own in partition.cells.items()
    }


def append(directory: Path, line: Decided | Measured) -> None:
    """Adds a line to the journal of a run's directory."""
    with (directory / PLACEMENT).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
