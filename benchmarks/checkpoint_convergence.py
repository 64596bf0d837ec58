"""Measures what asynchronous checkpoints do to learning, in runs of the quickstart.

    python benchmarks/checkpoint_convergence.py [--json] [--check] [--seeds 0:3] [--steps 120]

A save takes the state while the next step runs. If what it took were not the state of one step, a
run that goes on from it would learn otherwise. For each seed the quickstart is trained three times
from the same weights: without a save; with one every step; and killed_every_step, which saves every
step and has all of its processes killed (SIGKILL to the whole process group) as soon as a third,
and again when two thirds of its steps are written down, each time followed by ``g-core resume``.
The order of the three turns with the seed. Accuracy is that of the final weights on the held-out
problems, greedy, as the run evaluates it itself.

The bar: for every way of saving, the mean over the seeds lies no further from that without a save
than the seeds lie from each other (largest less smallest without a save), or than 0.01 where that
is more. Seconds go from the end of the first step to the end of the last, median over the seeds; of
a killed run they hold what it lost and the starting again.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from quickstart_runs import (
    RECIPE,
    finished_rows,
    make_policy,
    overrides_of,
    require_success,
    start,
    wall_s,
)
from report import Claim, add_options, publish, repeated

from gcore_core.config.plan import load_plan

DISTRIBUTIONS = ["gcore-core", "gcore-torch", "torch", "transformers", "numpy"]
#: name -> steps between saves, whether it is killed
WAYS = {
    "none": (0, False),
    "every_step": (1, False),
    "killed_every_step": (1, True),
}
LEAST_SPREAD = 0.01
WAIT_S = 900.0


class Study:
    """Runs of the quickstart with several ways of saving.

    folder: where runs and models lie.
    steps: steps of each run.
    changes: other overrides of the recipe; none where a result is measured.
    kills: how often a run was killed.
    """

    def __init__(self, folder: Path, steps: int, changes: Sequence[str] = ()) -> None:
        self._folder = folder
        self._steps = steps
        self._changes = changes
        self.kills = 0

    def run(self, seed: int, way: str) -> tuple[float, float]:
        """Returns the held-out accuracy of the final weights, and the seconds from first to last
        step.

        way: a key of WAYS.
        """
        every, killed = WAYS[way]
        directory = self._folder / f"{way}-{seed}"
        overrides = [
            *overrides_of(seed, directory),
            f"run.steps={self._steps}",
            f"evaluation.every={self._steps}",
            f"checkpoint.every={every}",
            *self._changes,
        ]
        make_policy(load_plan(RECIPE, overrides).config, self._folder)
        command = ["run", str(RECIPE), *overrides]
        for at in (self._steps // 3, 2 * self._steps // 3) if killed else ():
            self._start(command, directory, at)
            command = ["resume", str(directory)]
        self._start(command, directory, None)
        rows = finished_rows(directory, self._steps)
        return rows[-1]["evaluation"]["greedy/exact"], wall_s(rows)

    def _start(self, arguments: list[str], directory: Path, kill_at: int | None) -> None:
        """Runs to the end, or kills every process once step ``kill_at`` is written down.

        arguments: those of g-core.
        """
        log = directory.with_suffix(".log")
        process = start(arguments, self._folder, log, own_session=True)
        until_s = time.monotonic() + WAIT_S
        while process.poll() is None and not (
            kill_at is not None and _steps_done(directory) >= kill_at
        ):
            if time.monotonic() > until_s:
                os.killpg(process.pid, signal.SIGKILL)
                sys.exit(f"{' '.join(arguments)} did not end; see {log}")
            time.sleep(0.1)
        if kill_at is None:
            require_success(process, arguments, log)
        elif process.poll() is not None:
            sys.exit(
                f"{' '.join(arguments)} ended before it was killed:\n{log.read_text()[-2000:]}"
            )
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.kills += 1


def _steps_done(directory: Path) -> int:
    """Returns the number of steps that the run has written down."""
    metrics = directory / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else 0


def claims_of(
    accuracy: dict[str, list[float]], seconds: dict[str, list[float]], kills: int
) -> list[Claim]:
    """Returns the claims over all seeds.

    accuracy, seconds: way of saving -> a value for each seed.
    kills: how often a run was killed.
    """
    spread = max(max(accuracy["none"]) - min(accuracy["none"]), LEAST_SPREAD)
    mean = statistics.fmean
    return [
        *(
            repeated(f"accuracy_mean_{way}", values, mean, "share, greedy")
            for way, values in accuracy.items()
        ),
        *(
            Claim(f"accuracy_min_{way}", min(values), "share, greedy", 0.9)
            for way, values in accuracy.items()
        ),
        *(
            repeated(
                f"accuracy_{way}_less_none",
                [a - b for a, b in zip(accuracy[way], accuracy["none"], strict=True)],
                mean,
                "share, greedy",
            )
            for way in WAYS
            if way != "none"
        ),
        Claim("accuracy_between_seeds", spread, "share, largest less smallest without a save"),
        *(
            Claim(
                f"accuracy_{way}_apart_over_between_seeds",
                abs(mean(accuracy[way]) - mean(accuracy["none"])) / spread,
                "ratio",
                1.0,
                "<=",
            )
            for way in WAYS
            if way != "none"
        ),
        *(
            repeated(f"seconds_{way}", values, statistics.median, "s, all steps but one")
            for way, values in seconds.items()
        ),
        Claim("kills", kills, "of all processes of a run"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:3", help="first:end, default 0:3")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe; for a short run"
    )
    add_options(parser)
    args = parser.parse_args()
    first, end = map(int, args.seeds.split(":"))
    accuracy = defaultdict[str, list[float]](list)
    seconds = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder), args.steps, args.set)
        for seed in range(first, end):
            ways = list(WAYS)
            first_way = seed % len(ways)
            for way in ways[first_way:] + ways[:first_way]:
                held_out, took_s = study.run(seed, way)
                accuracy[way].append(held_out)
                seconds[way].append(took_s)
                print(f"seed {seed}, {way}: {held_out:.4f}, {took_s:.1f} s", file=sys.stderr)
        claims = claims_of(accuracy, seconds, study.kills)
    return publish("checkpoint_convergence", claims, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
