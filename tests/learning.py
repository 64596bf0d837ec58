"""Holds a recipe to what it is to learn, with one seed.

    python tests/learning.py RECIPE [--seed 0]

The recipe is run as a person runs it. Its last evaluation must hold the bar, and must be better
than the first one. The models that it makes lie in a cache of their own, so the seed is theirs too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gcore_core.contract.run_files import read_metrics

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a recipe is held to.

    metric: of the evaluation.
    least: what the last evaluation must reach.
    seeds: keys that a seed is written to.
    """

    metric: str
    least: float
    seeds: tuple[str, ...]


POLICY_SEEDS = ("run.seed", "roles.policy.model.make.config.seed")
BARS = {
    "quickstart": Bar(metric="greedy/exact", least=0.95, seeds=POLICY_SEEDS),
    "judge": Bar(
        metric="greedy/exact",
        least=0.95,
        seeds=(*POLICY_SEEDS, "roles.judge.model.make.config.seed"),
    ),
    "digits": Bar(
        metric="greedy/judged",
        least=0.9,
        # the classifiers are taught with the policy
        seeds=(
            *POLICY_SEEDS,
            "rewards.digit.config.config.seed",
            "rewards.judged.config.config.seed",
        ),
    ),
    # a pretrained model: 0.21 before
    "smollm2/notes": Bar(metric="greedy/kept", least=0.9, seeds=("run.seed",)),
}


def shortfall(before: Mapping[str, float], after: Mapping[str, float], bar: Bar) -> str:
    """Returns what a recipe did not learn, "" when it holds its bar."""
    first = before[bar.metric]
    last = after[bar.metric]
    if last < bar.least:
        return f"{bar.metric} is {last:.3f} at the end, the bar is {bar.least}"
    if last <= first:
        return f"{bar.metric} was {first:.3f} before and is {last:.3f}: nothing was learned"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether a recipe learns what it is to learn.")
    parser.add_argument("recipe", choices=list(BARS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "gcore_core", "run", f"recipes/{args.recipe}.yaml"),
            f"run.dir={directory}",
            *(f"{key}={args.seed}" for key in BARS[args.recipe].seeds),
        ]
        environment = {**os.environ, "G_CORE_CACHE": str(Path(folder) / "cache")}
        exit_code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if exit_code:
            print(f"{args.recipe}, seed {args.seed}: the run ended with {exit_code}")
            return 1
        evaluations = [row["evaluation"] for row in read_metrics(directory) if row["evaluation"]]
    reason = shortfall(evaluations[0], evaluations[-1], BARS[args.recipe])
    print(f"{args.recipe}, seed {args.seed}: {reason or 'learned'}")
    return int(bool(reason))


if __name__ == "__main__":
    sys.exit(main())
