"""Measures the quickstart with generation that runs ahead, beside the synchronous run.

step_time_over_sync      seconds a step of (ahead, age) = (1, 4) over those of ``core/sync`` with
                         one or with two slots a role, whichever is faster: median over seeds,
                         between the end of the first step and that of the last, without
                         evaluations
accuracy_after_min       held-out greedy accuracy after the run, of the worst seed and the worst of
                         (1, 1), (1, 4) and (2, 4)
age_max_over_promised    the largest age of any record over what its run promises; of runs with
                         samples that go on through pushes
dropped_for_age          groups that were begun for a step that is over and have neither been
                         trained on, nor filtered, nor been unusable

(1, 1) waits for samples at a push; the others let them go on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import quickstart_runs as runs
from report import Claim, interval

VERDICTS = ("trained", "filtered", "quarantined")
TWO_SLOTS = ("roles.policy.slots=2", "roles.rollout.slots=2", "cluster.devices=4")
#: Name of a run -> what it sets, its steps of lead, and the age that it promises.
WINDOWS = {"1_1": (1, 1, "wait"), "1_4": (1, 4, "recompute"), "2_4": (2, 4, "recompute")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--async-steps", type=int, default=0, help="of a run; 0: the recipe's own")
    parser.add_argument(
        "--async-overrides", nargs="*", default=[], help="further settings of all runs"
    )


def layouts() -> dict[str, tuple[str, ...]]:
    """Returns name of a run -> its overrides."""
    found: dict[str, tuple[str, ...]] = {"sync_1": (), "sync_2": TWO_SLOTS}
    for name, (ahead, age, midway) in WINDOWS.items():
        settings = {"ahead": ahead, "age": age, "midway": midway}
        found[name] = (
            "controller.use=async",
            *(f"controller.config.{key}={value}" for key, value in settings.items()),
        )
    return found


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    rounds = []
    accuracies = []
    shares = []
    dropped = 0.0
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as room:
        for seed in args.seeds:
            rows_of = {name: train(name, seed, args, Path(room)) for name in layouts()}
            step_s = {name: seconds_a_step(rows) for name, rows in rows_of.items()}
            rounds.append((step_s["1_4"], min(step_s["sync_1"], step_s["sync_2"])))
            for name, (_, age, _) in WINDOWS.items():
                rows = rows_of[name]
                accuracies.append(rows[-1]["evaluation"]["greedy/exact"])
                shares.append(max(row["metrics"]["age/largest"] for row in rows[1:]) / age)
                dropped += groups_dropped(rows)
            load = os.getloadavg()[0]
            told = {name: round(value, 3) for name, value in step_s.items()}
            print(f"seed {seed}: seconds a step {told}, load {load:.1f}", file=sys.stderr)
    ratios = [mine / theirs for mine, theirs in rounds]
    return [
        Claim(
            "step_time_over_sync",
            statistics.median(ratios),
            "ratio",
            0.68,
            "<=",
            interval(ratios, statistics.median),
        ),
        Claim("accuracy_after_min", min(accuracies), "share", 0.9),
        Claim("age_max_over_promised", max(shares), "ratio", 1.0, "<="),
        Claim("dropped_for_age", dropped, "groups", 0, "<="),
    ]


def train(name: str, seed: int, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs the quickstart in a layout; returns its metrics by step."""
    directory = folder / f"run-{name}-{seed}"
    words = [
        "run",
        str(runs.RECIPE),
        *runs.overrides_of(seed, directory),
        "evaluation.every=0",
        *([f"run.steps={args.async_steps}"] if args.async_steps else []),
        *layouts()[name],
        *args.async_overrides,
    ]
    log = folder / f"run-{name}-{seed}.log"
    runs.require_success(runs.start(words, folder, log), words, log)
    return runs.finished_rows(directory, args.async_steps or 120)


def seconds_a_step(rows: list[dict[str, Any]]) -> float:
    """Returns the mean seconds of a step, from the end of the first step on."""
    evaluations = sum(row["metrics"].get("seconds/evaluation", 0.0) for row in rows[2:])
    return (runs.wall_s(rows) - evaluations) / max(len(rows) - 2, 1)


def groups_dropped(rows: list[dict[str, Any]]) -> float:
    """Returns how many ordinals a run has consumed without a verdict."""
    verdicts = sum(
        row["metrics"].get(f"groups/{verdict}", 0.0) for row in rows[1:] for verdict in VERDICTS
    )
    return float(rows[-1]["metrics"]["ordinals/next"]) - verdicts
