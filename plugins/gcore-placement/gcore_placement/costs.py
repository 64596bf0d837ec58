"""Runs ``g-core placement costs RUN``, and writes the same as a section of the run's summary.

It says where the time of every device went, how much of it was idle, what measuring cost and how
far off the predictions were.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gcore_core.contract import run_files
from gcore_core.contract.errors import DataError

SECTION = "placement.md"
_LISTED = 16  # most devices that are listed one by one


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What all steps that ended have cost, from each step's push to the end of its training.

    steps: how many ended.
    shares: cause -> share of the time of all devices.
    devices: first device of a cell -> cause -> share of its own time.
    idle: cause -> share of the rollouts' time.
    moved: cells that changed roles, over all steps.
    switch_s: seconds that changing roles took, over all steps.
    monitoring: share of the steps' time that sending and receiving measurements and deciding took,
        as if every device had waited for it.
    off_median, off_p95: distance of a step's predicted from its measured seconds, over the measured
        ones; None where nothing was predicted.
    fallbacks: decisions that fell back to the best split that ran, because predictions were wrong
        for too long.
    """

    steps: int
    shares: Mapping[str, float]
    devices: Mapping[int, Mapping[str, float]]
    idle: Mapping[str, float]
    moved: int
    switch_s: float
    monitoring: float
    off_median: float | None
    off_p95: float | None
    fallbacks: int


def spent(outcome: run_files.Measured) -> dict[int, dict[str, float]]:
    """Returns first device of each cell -> cause -> seconds of the step.

    A step counts from its push to the end of its training.
    """
    stages = {
        "training": outcome.training_s,
        "pushing": outcome.pushing_s,
        "changing roles": outcome.switch_s,
    }
    return {
        device: {f"{role} runs": seconds for role, seconds in role_seconds.items()}
        | {_waits(role_seconds): outcome.waited[device]}
        | stages
        for device, role_seconds in outcome.ran.items()
    }


def idle(outcome: run_files.Measured) -> dict[str, float]:
    """Returns cause -> share of the devices' time in the rollout that was idle for it."""
    shares: dict[str, float] = defaultdict(float)
    # Every cell counts alike: its idle seconds over the rollout's, divided by the number of cells.
    for device, role_seconds in outcome.ran.items():
        shares[_waits(role_seconds)] += (
            outcome.waited[device] / len(outcome.ran) / max(outcome.measured_s, 1e-9)
        )
    if outcome.turns_s:
        shares["changing roles"] = outcome.turns_s / max(outcome.measured_s, 1e-9)
    return dict(shares)


def off(predicted_s: float, measured_s: float) -> float:
    """Returns how far predicted seconds lie above measured ones, as a share of those.

    A rollout takes no time where all groups of its step were there before.
    """
    return predicted_s / max(measured_s, 1e-9) - 1


def _waits(role_seconds: Mapping[str, float]) -> str:
    """Returns the cause for which a cell was idle, such as "rollout waits".

    role_seconds: the roles that ran in the cell. With several of them it is "all wait".
    """
    return "all wait" if len(role_seconds) > 1 else f"{next(iter(role_seconds))} waits"


def costs_of(
    decisions: Mapping[int, run_files.Decided], outcomes: Mapping[int, run_files.Measured]
) -> Costs:
    """Adds up a run's journal. Raises DataError when no step of it ended."""
    if not outcomes:
        raise DataError(
            "no step with a placement decision has ended yet.",
            where=run_files.PLACEMENT,
            why="a step's costs are known when the next one is placed",
            todo="wait for the second step",
        )
    by_device: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_cause: dict[str, float] = defaultdict(float)
    for outcome in outcomes.values():
        for device, causes in spent(outcome).items():
            for cause, seconds in causes.items():
                by_device[device][cause] += seconds
        for cause, share in idle(outcome).items():
            by_cause[cause] += share * outcome.measured_s
    rollout_s = max(sum(outcome.measured_s for outcome in outcomes.values()), 1e-9)
    total: dict[str, float] = defaultdict(float)
    for causes in by_device.values():
        for cause, seconds in causes.items():
            total[cause] += seconds
    errors = [
        abs(off(decisions[step].predicted_s[decisions[step].chosen], outcome.measured_s))
        for step, outcome in outcomes.items()
        if step in decisions
        and decisions[step].chosen in decisions[step].predicted_s
        and not decisions[step].rescues
    ]
    step_s = max((sum(causes.values()) for causes in by_device.values()), default=rollout_s)
    return Costs(
        steps=len(outcomes),
        shares=_shares(total),
        devices={device: _shares(causes) for device, causes in sorted(by_device.items())},
        idle={cause: seconds / rollout_s for cause, seconds in by_cause.items()},
        moved=sum(outcome.moved for outcome in outcomes.values()),
        switch_s=sum(outcome.switch_s for outcome in outcomes.values()),
        monitoring=sum(outcome.monitoring_s for outcome in outcomes.values()) / max(step_s, 1e-9),
        off_median=float(np.median(errors)) if errors else None,
        off_p95=float(np.percentile(errors, 95)) if errors else None,
        fallbacks=sum(bool(decided.seen.get("fell_back")) for decided in decisions.values()),
    )


def section(run_dir: Path) -> str:
    """Returns the costs of a run as a Markdown section. Raises DataError when no step has ended."""
    return (
        "\n".join(
            [
                "## Where the devices' time went\n",
                *_markdown(costs_of(*run_files.read_placement(run_dir))),
            ]
        )
        + "\n"
    )


def run(words: list[str]) -> int:
    """Runs ``g-core placement costs`` with these command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="g-core placement costs",
        description="Says where the time of every device went, over a whole run.",
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="the run's directory, e.g. runs/judge/001"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    costs = costs_of(*run_files.read_placement(args.run_dir))
    print(json.dumps(asdict(costs), indent=2) if args.json else "\n".join(_markdown(costs)))
    return 0


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns cause -> share of all seconds, the largest first."""
    total_s = max(sum(seconds.values()), 1e-9)
    return {
        cause: value / total_s
        for cause, value in sorted(seconds.items(), key=lambda item: -item[1])
    }


def _markdown(costs: Costs) -> Iterator[str]:
    """Yields the lines of the costs: a table by device, then a list."""
    causes = list(costs.shares)
    yield from _table(
        [
            ["device", *causes],
            ["all", *(f"{costs.shares[cause]:.1%}" for cause in causes)],
            *(
                [str(device), *(f"{shares.get(cause, 0.0):.1%}" for cause in causes)]
                for device, shares in list(costs.devices.items())[:_LISTED]
            ),
        ]
    )
    yield ""
    if len(costs.devices) > _LISTED:
        yield (
            f"- {len(costs.devices) - _LISTED} more devices: `g-core placement costs RUN "
            "--json` tells all"
        )
    waited = (
        ", ".join(f"{share:.1%} {cause}" for cause, share in costs.idle.items() if share > 0)
        or "nothing"
    )
    yield f"- idle in the rollout: {waited}"
    yield (
        f"- {costs.moved} cells changed roles in {costs.steps} steps, which took "
        f"{costs.switch_s:.1f} s"
    )
    yield f"- measuring and deciding took {costs.monitoring:.2%} of the time"
    if costs.off_median is not None and costs.off_p95 is not None:
        yield (
            f"- predictions were off by {costs.off_median:.1%} (median), {costs.off_p95:.1%} "
            "(95th percentile)"
        )
    if costs.fallbacks:
        yield (
            f"- {costs.fallbacks} times the predictions were wrong for too long: the best "
            "split that ran was taken"
        )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields a Markdown table whose columns are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    rule = "|".join("-" * (width + 1) + ":" for width in widths)
    yield f"| {lines[0]} |"
    yield f"|{rule}|"
    yield from (f"| {line} |" for line in lines[1:])
