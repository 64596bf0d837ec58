"""``placement.jsonl`` of a run: what was decided before each step, what it came to; one JSON object
a line.

Lines have a ``what``: "decision" or "outcome". A step that was begun again after a crash has
several; the last counts. A decision with ``rescued`` took the place of its step's within the step
or right at its start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import DataError
from gcore_core.contract.placement import Decision, Partition

FILE = "placement.jsonl"


class Decided(
    msgspec.Struct, tag="decision", tag_field="what", kw_only=True, omit_defaults=True, frozen=True
):
    """A ``Decision`` as plain values; cells as lists of device indexes, by role. took_s: what
    deciding took. rescued: the role for which it took the place of the one before. rescues: those
    that took this one's place.
    """

    step: int
    mode: str
    cells: dict[str, list[list[int]]]
    engines: dict[str, list[list[int]]] | None = None
    chosen: str = ""
    predicted_s: dict[str, float] = {}
    reason: str = ""
    seen: dict[str, Any] = {}
    state: dict[str, Any] = {}
    took_s: float = 0.0
    rescued: str = ""
    rescues: list[Decided] = []


class Measured(
    msgspec.Struct, tag="outcome", tag_field="what", kw_only=True, omit_defaults=True, frozen=True
):
    """What a decision came to, in seconds: of the rollout (measured_s), of changing roles, of which
    turns_s within the rollout, of training and of pushing. ran: first device of each cell of the
    generators -> role -> how long it ran anything in the rollout; waited: how long nothing ran
    there. monitoring_s: of telling, hearing and deciding.
    """

    step: int
    measured_s: float
    work: float = 0.0
    moved: int = 0  # cells that changed roles
    switch_s: float = 0.0
    turns_s: float = 0.0
    training_s: float = 0.0
    pushing_s: float = 0.0
    ran: dict[int, dict[str, float]] = {}
    waited: dict[int, float] = {}
    monitoring_s: float = 0.0


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
    with (directory / FILE).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read(directory: Path) -> tuple[dict[int, Decided], dict[int, Measured]]:
    """The decisions and the outcomes of a run, by step; half a line at the end, of a run that was
    killed, is left out.

    Raises DataError for a run without a journal or a line that is none.
    """
    path = directory / FILE
    if not path.is_file():
        raise DataError(
            "the run has no record of placement decisions.",
            where=str(path),
            why="it is written by runs whose placement policy moves devices between generators",
            todo="give the directory of such a run",
        )
    decisions: dict[int, Decided] = {}
    outcomes: dict[int, Measured] = {}
    decode = msgspec.json.Decoder(Decided | Measured).decode
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = decode(text)
        except msgspec.MsgspecError as error:
            raise DataError(
                "a line cannot be read.", where=f"{path}:{number}", why=str(error)
            ) from None
        if isinstance(line, Decided) and line.rescued and line.step in decisions:
            decisions[line.step].rescues.append(line)
        elif isinstance(line, Decided):
            decisions[line.step] = line
        else:
            outcomes[line.step] = line
    return decisions, outcomes
