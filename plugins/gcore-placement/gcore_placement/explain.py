"""Runs ``g-core placement explain RUN --step N``, which says why a step was placed as it was.

It prints what the policy saw, what it predicted for each candidate, which it chose, and what was
then measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract import run_files
from gcore_core.contract.errors import DataError
from gcore_placement.costs import idle, off


def run(words: list[str]) -> int:
    """Runs ``g-core placement explain`` with these command-line arguments; returns the exit
    code.
    """
    parser = argparse.ArgumentParser(
        prog="g-core placement explain",
        description="Says why the devices of a step were placed as they were.",
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="the run's directory, e.g. runs/quickstart/001"
    )
    parser.add_argument("--step", type=int, help="which step; without it, every step in a line")
    parser.add_argument(
        "--json", action="store_true", help="print the records of the step as one JSON object"
    )
    args = parser.parse_args(words)
    decisions, outcomes = run_files.read_placement(args.run_dir)
    if args.step is None:
        print("\n".join(_lines(decisions, outcomes)))
        return 0
    if args.step not in decisions:
        steps = f"steps {min(decisions)} to {max(decisions)}" if decisions else "no steps"
        raise DataError(
            f"there is no decision for step {args.step}.",
            where=str(args.run_dir),
            why=f"there are {steps}",
        )
    decided = decisions[args.step]
    measured = outcomes.get(args.step)
    if args.json:
        records = {
            "decision": msgspec.to_builtins(decided),
            "outcome": msgspec.to_builtins(measured),
        }
        print(json.dumps(records, indent=2))
    else:
        print("\n".join(_explain_step(decided, measured)))
    return 0


def _lines(
    decisions: Mapping[int, run_files.Decided], outcomes: Mapping[int, run_files.Measured]
) -> Iterator[str]:
    """Yields the table of all decisions, a line for each step."""
    yield f"{'step':>5}  {'chosen':<12} {'predicted s':>11} {'measured s':>11} {'error':>7}  reason"
    for step, decided in sorted(decisions.items()):
        predicted = decided.predicted_s.get(decided.chosen)
        measured = outcomes.get(step)
        numbers = [
            "" if predicted is None else f"{predicted:.1f}",
            "" if measured is None else f"{measured.measured_s:.1f}",
            ""
            if predicted is None or measured is None
            else f"{off(predicted, measured.measured_s):+.1%}",
        ]
        yield (
            f"{step:>5}  {decided.chosen:<12} {numbers[0]:>11} {numbers[1]:>11} "
            f"{numbers[2]:>7}  {decided.reason}"
        )


def _explain_step(decided: run_files.Decided, measured: run_files.Measured | None) -> Iterator[str]:
    """Yields the lines that explain one step.

    measured: the step's outcome; None when the step has not ended.
    """
    yield f"step {decided.step}: {decided.chosen or decided.mode} ({decided.mode})"
    yield f"  because  {decided.reason}"
    for role, cells in decided.cells.items():
        yield (
            f"  {role:<8} {len(cells)} cells: devices "
            f"{_ranges([index for cell in cells for index in cell])}"
        )
    if decided.seen:
        yield "seen"
        yield from (f"  {name:<18} {_plain(value)}" for name, value in decided.seen.items())
    if decided.predicted_s:
        yield "predicted seconds of the rollout"
        least_s = min(decided.predicted_s.values())
        for name, seconds in decided.predicted_s.items():
            mark = "  <- chosen" if name == decided.chosen else ""
            yield (
                f"  {name:<18} {seconds:>9.1f}  {off(seconds, least_s):+6.1%} of the latest "
                f"step's least{mark}"
            )
    for rescue in decided.rescues:
        yield f"rescue of {rescue.rescued} ({rescue.mode})"
        yield f"  because  {rescue.reason}"
        for role, cells in rescue.cells.items():
            yield (
                f"  {role:<8} {len(cells)} cells: devices "
                f"{_ranges([index for cell in cells for index in cell])}"
            )
        yield from (f"  {name:<18} {_plain(value)}" for name, value in rescue.seen.items())
    if measured is None:
        yield "measured: nothing, the step did not end"
        return
    yield (
        f"measured: {measured.measured_s:.1f} s; {measured.moved} cells changed roles in "
        f"{measured.switch_s:.1f} s"
    )
    predicted = decided.predicted_s.get(decided.chosen)
    if predicted is not None:
        yield f"  the prediction was off by {off(predicted, measured.measured_s):+.1%}"
    yield from (
        f"  idle {share:>6.1%}  {cause}" for cause, share in idle(measured).items() if share > 0
    )


def _plain(value: Any) -> str:
    """Writes a number with four digits, and anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ranges(indexes: list[int]) -> str:
    """Writes indexes as ranges, such as ``0-3, 8``."""
    parts: list[list[int]] = []
    for index in sorted(set(indexes)):
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
