"""Makes the panel of placement: which role was awake on which device, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore_core.contract.errors import DataError
from gcore_core.contract.run_files import Decided, Measured, read_placement
from gcore_report.page import limits
from gcore_report.page.processes import lives
from gcore_report.page.runs import Run

RULE = (
    "A device has the colour of the role that is awake on it in the rollout. Of more than "
    f"{limits.MAP_COLUMNS} steps, so many are shown, at equal distances."
)


def placement(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the placement of each run through its steps."""
    return {"runs": [_of_run(run) for run in runs], "rule": RULE}


def _of_run(run: Run) -> dict[str, Any]:
    """Returns the placement of one run.

    moves: whether its placement policy moves devices; without it only ``lives`` is filled.
    lives: [process, first step, last step].
    roles, devices, steps, z: z[device][step] is the number of the role awake there, or None.
    seconds: columns ``predicted``, ``measured``, ``switch`` and ``waited`` of each shown step.
    reasons: why the policy chose so, where it says it.
    """
    try:
        decisions, outcomes = read_placement(run.directory)
    except DataError:
        return {"label": run.label, "moves": False, "lives": lives(run)}
    every = sorted(decisions)
    chosen = np.linspace(0, len(every) - 1, min(len(every), limits.MAP_COLUMNS))
    steps = [every[int(i)] for i in chosen] if every else []
    roles = list(dict.fromkeys(role for step in steps for role in decisions[step].cells))
    devices = sorted({d for step in steps for d in _awake(decisions[step])})
    awake = [_awake(decisions[step]) for step in steps]
    z = [[_number(roles, at.get(device)) for at in awake] for device in devices]
    return {
        "label": run.label,
        "moves": True,
        "lives": lives(run),
        "roles": roles,
        "devices": devices,
        "steps": steps,
        "z": z,
        "seconds": _seconds(steps, decisions, outcomes),
        "reasons": [decisions[step].reason for step in steps],
    }


def _number(roles: Sequence[str], role: str | None) -> int | None:
    return None if role is None else roles.index(role)


def _awake(decided: Decided) -> dict[int, str]:
    """Returns device -> the role that is awake on it."""
    return {
        device: role for role, cells in decided.cells.items() for cell in cells for device in cell
    }


def _seconds(
    steps: Sequence[int],
    decisions: Mapping[int, Decided],
    outcomes: Mapping[int, Measured],
) -> dict[str, list[float | None]]:
    columns: dict[str, list[float | None]] = {
        name: [] for name in ("predicted", "measured", "switch", "waited")
    }
    for step in steps:
        decided = decisions[step]
        outcome = outcomes.get(step)
        columns["predicted"].append(decided.predicted_s.get(decided.chosen))
        columns["measured"].append(outcome.measured_s if outcome else None)
        columns["switch"].append(outcome.switch_s if outcome else None)
        waited = list(outcome.waited.values()) if outcome else []
        columns["waited"].append(sum(waited) / len(waited) if waited else None)
    return columns
