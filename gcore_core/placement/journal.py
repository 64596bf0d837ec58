"""``placement.jsonl`` of a run: what was decided before each step, what it came to; one JSON object a line.

Lines have a ``what``: "decision" or "outcome". A step that was begun again after a crash has several; the last counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.errors import DataError
from gcore_core.placement.devices import Decision, Partition
from gcore_core.placement.measured import Outcome

FILE = "placement.jsonl"


class Decided(msgspec.Struct, tag="decision", tag_field="what", kw_only=True, omit_defaults=True, frozen=True):
    """A ``Decision`` as plain values; cells as lists of device indexes, by role. took_s: what deciding took."""

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


class Measured(msgspec.Struct, tag="outcome", tag_field="what", kw_only=True, omit_defaults=True, frozen=True):
    """What a decision came to. idle: cause -> share of the devices' time in the rollout. devices: first device of each
    cell of the generators -> cause -> seconds of the step, from the push to the end of training; what is in no cause is
    time of the rollout in which a device waited. monitoring_s: what telling, hearing and deciding took the lead.
    """

    step: int
    measured_s: float
    work: float = 0.0
    moved: int = 0  # cells that changed roles
    switch_s: float = 0.0  # what that took
    idle: dict[str, float] = {}
    devices: dict[int, dict[str, float]] = {}
    monitoring_s: float = 0.0


def decided(step: int, decision: Decision, took_s: float = 0.0) -> Decided:
    """What is written of a decision. ``state`` and ``seen`` must be plain values."""
    cells, engines = _indexes(decision.partition), decision.engines
    return Decided(
        step=step,
        mode=decision.mode,
        cells=cells,
        engines=None if engines is None else _indexes(engines),
        chosen=decision.chosen,
        predicted_s=dict(decision.predicted_s),
        reason=decision.reason,
        seen=dict(decision.seen),
        state=dict(decision.state),
        took_s=took_s,
    )


def _indexes(partition: Partition) -> dict[str, list[list[int]]]:
    return {role: [[device.index for device in cell.devices] for cell in own] for role, own in partition.cells.items()}


def append(directory: Path, line: Decided | Measured) -> None:
    """Adds a line to the journal of a run's directory."""
    with (directory / FILE).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read(directory: Path) -> tuple[dict[int, Decided], dict[int, Measured]]:
    """The decisions and the outcomes of a run, by step; half a line at the end, of a run that was killed, is left out.

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
            raise DataError("a line cannot be read.", where=f"{path}:{number}", why=str(error)) from None
        if isinstance(line, Decided):
            decisions[line.step] = line
        else:
            outcomes[line.step] = line
    return decisions, outcomes


def outcomes_of(decisions: Mapping[int, Decided], outcomes: Mapping[int, Measured]) -> tuple[Outcome, ...]:
    """The outcomes as a policy sees them in its window, oldest first: what a resumed run begins with."""
    return tuple(
        Outcome(
            step=step,
            candidate=decisions[step].chosen,
            predicted_s=decisions[step].predicted_s.get(decisions[step].chosen),
            measured_s=outcomes[step].measured_s,
            work=outcomes[step].work,
        )
        for step in sorted(decisions.keys() & outcomes.keys())
    )
