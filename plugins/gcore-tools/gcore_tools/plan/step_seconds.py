"""Says how many seconds a step is expected to take, from what an earlier run has measured.

Nothing is guessed: a phase that no run has measured is told as not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from gcore_core.contract.engine_profiles import EngineFit
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.job_settings import POLICY, ROLLOUT
from gcore_core.contract.preflight import PlacedJob, ResolvedJob
from gcore_core.contract.run_files import Measured, read_metrics, read_placement
from gcore_core.kits.runs import read_config

#: Steps at the end of the run that are looked at: earlier ones have shorter records.
_STEPS = 8
_NOT_MEASURED = "expected seconds of a step: not measured"


def expected_seconds(
    plan: ResolvedJob, placed: PlacedJob, directory: Path | None = None
) -> list[str]:
    """Returns a line for each phase.

    directory: of the run that has measured; None: the latest of this name that has.
    Raises DataError for a directory that was given and has measured nothing.
    """
    found = _measured(directory) if directory is not None else _latest(plan)
    if found is None:
        return [
            f"{_NOT_MEASURED}; a run measures where its placement policy moves devices "
            "(placement.use: placement)"
        ]
    run, outcomes, rows = found
    slots = _slots_of(run)
    lines = [_rollout(plan, placed, role, outcomes, rows, run) for role in _fits(outcomes)]
    same = slots.get(POLICY) == plan.settings.roles[POLICY].slots if POLICY in slots else False
    for name, values in {
        "training": [one.training_s for one in outcomes],
        "push": [one.pushing_s for one in outcomes],
    }.items():
        if same:
            lines.append(f"{name}: {median(values):.3g} s, measured in {run} on as many slots")
        else:
            lines.append(f"{name}: not measured on {plan.settings.roles[POLICY].slots} slots")
    return lines


def _rollout(
    plan: ResolvedJob,
    placed: PlacedJob,
    role: str,
    outcomes: list[Measured],
    rows: list[Mapping[str, Any]],
    run: Path,
) -> str:
    """Returns what a role's replicas take to sample as much as in the earlier run."""
    if role != ROLLOUT or role not in placed.workers:
        return f"rollout, {role}: measured in {run}, and only records of {ROLLOUT} are foreseen"
    import numpy as np

    profile = _fits(outcomes)[role].profile
    length = median(float(row["length"]) for row in rows)
    actions = median(float(row["actions"]) for row in rows)
    records = round(actions / length)
    replicas = len(placed.workers[role])
    alone = profile.seconds(np.zeros(1), np.array([length]))
    seconds = float(alone[0]) * records / replicas
    return (
        f"rollout: {seconds:.3g} s, by the profile of {run}: {records} records of {length:.0f} "
        f"actions over {replicas} replicas that are always full; prompts are not counted"
    )


def _fits(outcomes: list[Measured]) -> dict[str, EngineFit]:
    """Returns the latest profile of each role that was fitted to requests."""
    return {role: fit for one in outcomes for role, fit in one.engines.items() if fit.requests}


def _measured(run: Path) -> tuple[Path, list[Measured], list[Mapping[str, Any]]]:
    """Returns what a run has measured: (its directory, outcomes, metrics of its last steps).

    Raises DataError where it has fitted no profile of an engine.
    """
    _, by_step = read_placement(run)
    outcomes = [by_step[step] for step in sorted(by_step)][-_STEPS:]
    metrics = [row["metrics"] for row in read_metrics(run)]
    rows: list[Mapping[str, Any]] = [m for m in metrics if m.get("length") and m.get("actions")]
    if not _fits(outcomes) or not rows:
        raise DataError(
            "the run has fitted no profile of an engine.",
            where=str(run),
            todo="give a run that has finished some steps with placement.use: placement",
        )
    return run, outcomes, rows[-_STEPS:]


def _latest(plan: ResolvedJob) -> tuple[Path, list[Measured], list[Mapping[str, Any]]] | None:
    """Returns what the latest run of this name has measured; None where none has."""
    numbered = [path for path in (Path("runs") / plan.name).glob("[0-9]*") if path.name.isdecimal()]
    for run in sorted(numbered, key=lambda path: -int(path.name)):
        try:
            return _measured(run)
        except DataError:
            continue
    return None


def _slots_of(run: Path) -> dict[str, int]:
    """Returns role -> its slots in an earlier run; {} where its configuration cannot be read."""
    try:
        roles = read_config(run)["roles"]
        return {name: int(node["slots"]) for name, node in roles.items()}
    except (OSError, ConfigError, KeyError, TypeError, ValueError):
        return {}
