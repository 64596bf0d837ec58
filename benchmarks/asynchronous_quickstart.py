"""Measures the quickstart with generation that runs ahead, beside the synchronous run.

    python benchmarks/asynchronous_quickstart.py [--seeds 0 1 2 3 4] [--json] [--check]

Runs of both programs are interleaved, so that both meet the same load.

step_time_over_sync      seconds a step of (ahead, age) = (1, 4) over those of ``core/sync`` with
                         one or with two slots a role, whichever is faster: median over seeds,
                         between the end of the first step and that of the last, without
                         evaluations
step_time_over_bound     seconds a step of (1, 4) over the larger of generation and training alone:
                         the seconds of the stage "rollout", and those of all others together, in
                         the run of ``core/sync`` with one slot a role, where the two take turns
seconds_to_95_over_sync  seconds until the records of five steps have a mean reward of .95, over
                         those of the faster synchronous run; from the end of the first step
cpu_seconds_to_95_over_sync
                         the same for the processor seconds of all processes
accuracy_after_min       held-out greedy accuracy after the run, of the worst seed and the worst of
                         (1, 1), (1, 4) and (2, 4)
age_max_over_promised    the largest age of any record over what its run promises, of (1, 1), (1, 4)
                         and (2, 4)
dropped_for_age          groups that were begun for a step that is over and have neither been
                         trained on, nor filtered, nor been unusable
drawn_again_without_a_death
                         records of the asynchronous runs, in which nothing dies, whose sample was
                         drawn before and lost

(1, 1) waits for samples at a push; the others let them go on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import quickstart_runs as runs
from report import Claim, add_options, interval, publish

from gcore_core.contract.run_files import RecordTrace, read_trace

VERDICTS = ("trained", "filtered", "quarantined")
TWO_SLOTS = ("roles.policy.slots=2", "roles.rollout.slots=2", "cluster.devices=4")
#: A mean reward of so many steps in a row counts as learned.
SMOOTHED = 5
ENOUGH = 0.95
#: Name of a run -> its steps of lead, the age that it promises, and what a push does.
WINDOWS = {"1_1": (1, 1, "wait"), "1_4": (1, 4, "recompute"), "2_4": (2, 4, "recompute")}


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


@dataclass(frozen=True)
class Compared:
    """Holds ratios of a seed's run of (1, 4).

    step: seconds a step, over those of the faster synchronous run.
    bound: seconds a step, over those of generation or of training alone, whichever is longer.
    seconds_to_95, cpu_s_to_95: over the synchronous run that is there first; None where runs are
        too short to get there.
    """

    step: float
    bound: float
    seconds_to_95: float | None = None
    cpu_s_to_95: float | None = None


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns what the runs say."""
    rounds = []
    accuracies = []
    shares = []
    dropped = 0.0
    drawn_again = 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as room:
        for seed in args.seeds:
            rows_of = {name: train(name, seed, args, Path(room)) for name in layouts()}
            rounds.append(compared(rows_of, is_short=bool(args.steps)))
            for name, (_, age, _) in WINDOWS.items():
                rows = rows_of[name]
                accuracies.append(rows[-1]["evaluation"]["greedy/exact"])
                shares.append(max(row["metrics"]["age/largest"] for row in rows[1:]) / age)
                dropped += groups_dropped(rows)
                drawn_again += records_drawn_again(run_directory(Path(room), name, seed))
            load = os.getloadavg()[0]
            step_s = {name: round(seconds_a_step(rows), 3) for name, rows in rows_of.items()}
            print(f"seed {seed}: seconds a step {step_s}, load {load:.1f}", file=sys.stderr)
            print(f"seed {seed}: {rounds[-1]}", file=sys.stderr)
    bars = {
        "step_time_over_sync": ("step", 0.68),
        "step_time_over_bound": ("bound", 1.10),
        "seconds_to_95_over_sync": ("seconds_to_95", 0.75),
        "cpu_seconds_to_95_over_sync": ("cpu_s_to_95", 1.1),
    }
    claims = []
    for name, (of, bar) in bars.items():
        ratios = [getattr(one, of) for one in rounds]
        if None in ratios:
            continue
        middle = statistics.median(ratios)
        claims.append(Claim(name, middle, "ratio", bar, "<=", interval(ratios, statistics.median)))
    return [
        *claims,
        Claim("accuracy_after_min", min(accuracies), "share", 0.9),
        Claim("age_max_over_promised", max(shares), "ratio", 1.0, "<="),
        Claim("dropped_for_age", dropped, "groups", 0, "<="),
        Claim("drawn_again_without_a_death", drawn_again, "records", 0, "<="),
    ]


def compared(rows_of: Mapping[str, list[dict[str, Any]]], is_short: bool) -> Compared:
    """Compares a seed's run of (1, 4) with its synchronous ones.

    rows_of: name of a layout -> the metrics of its run, by step.
    is_short: the runs are too short to learn the task.
    """
    ours = rows_of["1_4"]
    alone = rows_of["sync_1"]
    synchronous = [alone, rows_of["sync_2"]]
    # Stages of core/sync do not overlap: what is not generation is training.
    generation_s = statistics.fmean(row["metrics"]["seconds/rollout"] for row in alone[2:])
    training_s = seconds_a_step(alone) - generation_s
    found = Compared(
        step=seconds_a_step(ours) / min(map(seconds_a_step, synchronous)),
        bound=seconds_a_step(ours) / max(generation_s, training_s),
    )
    if is_short:
        return found
    seconds, cpu_s = until_95(ours)
    theirs = [until_95(rows) for rows in synchronous]
    return replace(
        found,
        seconds_to_95=seconds / min(one[0] for one in theirs),
        cpu_s_to_95=cpu_s / min(one[1] for one in theirs),
    )


def until_95(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Returns seconds and processor seconds until the records of five steps have .95 of reward.

    Both count from the end of the first step. Ends the benchmark where a run does not get there.
    """
    for last in range(1 + SMOOTHED, len(rows) + 1):
        latest = rows[last - SMOOTHED : last]
        if statistics.fmean(row["metrics"]["reward/exact"] for row in latest) >= ENOUGH:
            first, reached = rows[1], latest[-1]
            return (
                float(reached["time_unix_s"] - first["time_unix_s"]),
                float(reached["metrics"]["cpu_seconds"] - first["metrics"]["cpu_seconds"]),
            )
    sys.exit(f"a run's reward has not reached {ENOUGH} in {len(rows) - 1} steps")


def train(name: str, seed: int, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs the quickstart in a layout; returns its metrics by step."""
    directory = run_directory(folder, name, seed)
    words = [
        "run",
        str(runs.RECIPE),
        *runs.overrides_of(seed, directory),
        "evaluation.every=0",
        *([f"run.steps={args.steps}"] if args.steps else []),
        *layouts()[name],
        *args.overrides,
    ]
    log = folder / f"run-{name}-{seed}.log"
    runs.require_success(runs.start(words, folder, log), words, log)
    return runs.finished_rows(directory, args.steps or 120)


def run_directory(folder: Path, name: str, seed: int) -> Path:
    """Returns where a run lies."""
    return folder / f"run-{name}-{seed}"


def records_drawn_again(run_dir: Path) -> int:
    """Returns how many records of a run are of samples that were drawn before and lost."""
    return sum(isinstance(line, RecordTrace) and line.attempt > 0 for line in read_trace(run_dir))


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0: the recipe's own")
    parser.add_argument("--overrides", nargs="*", default=[], help="further settings of all runs")
    add_options(parser)
    args = parser.parse_args()
    packages = ("gcore-core", "gcore-async", "torch", "transformers")
    return publish("asynchronous_quickstart", measure(args), args, packages)


if __name__ == "__main__":
    sys.exit(main())
