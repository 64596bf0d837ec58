"""Holds a recipe to what it is to learn, with one seed.

    python tests/learning.py RECIPE [--seed 0]

The recipe is run as a person runs it, after the recipes whose weights it begins with. Its last
evaluation must hold the bar, and must be better than the first one. The last line is what was
learned, as JSON: wall and processor seconds are those of the recipe itself, without former stages.
The models that it makes lie in a cache of their own, so the seed is theirs too; a pretrained one is
taken from the usual cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gcore_core.contract.run_files import read_metrics

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a recipe is held to.

    metric: of the evaluation.
    least: what the last evaluation must reach; by default anything that is better than the first,
        for a recipe whose end was measured too seldom to hold it to a number.
    seeds: keys that a seed is written to.
    after: recipes that are run before it, in this order, with the same seed.
    """

    metric: str
    least: float = -math.inf
    seeds: tuple[str, ...] = ("run.seed",)
    after: tuple[str, ...] = ()


POLICY_SEEDS = ("run.seed", "roles.policy.model.make.config.seed")
BARS = {
    "quickstart": Bar(metric="greedy/exact", least=0.95, seeds=POLICY_SEEDS),
    "judge": Bar(
        metric="greedy/exact",
        least=0.95,
        seeds=(*POLICY_SEEDS, "roles.judge.model.make.config.seed"),
    ),
    "agent": Bar(metric="greedy/right", least=0.9, seeds=POLICY_SEEDS),
    "calculator": Bar(metric="sampled/right", least=0.9, seeds=POLICY_SEEDS),
    "calculator_async": Bar(metric="sampled/right", least=0.85, seeds=POLICY_SEEDS),
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
    "noughts": Bar(
        metric="greedy/win",
        seeds=(*POLICY_SEEDS, "roles.opponent.model.make.config.seed"),
    ),
    "reasoning": Bar(metric="greedy/right", seeds=POLICY_SEEDS),
    "refine": Bar(metric="sampled/last", seeds=POLICY_SEEDS),
    # a pretrained model: 0.21 before
    "smollm2/notes": Bar(metric="greedy/kept", least=0.9),
    "smollm2/length": Bar(metric="greedy/near"),  # minus the error in tokens
    "smollm2/happy": Bar(metric="greedy/feeling"),
    "smollm2/judged": Bar(metric="greedy/feeling"),
    "smollm2/reasoning": Bar(metric="greedy/right"),
    "smollm2/feedback_dpo": Bar(metric="given/rewards/accuracy", after=("smollm2/feedback_sft",)),
    "smollm2/feedback_reward_model": Bar(
        metric="given/rewards/accuracy", after=("smollm2/feedback_sft",)
    ),
    "smollm2/feedback_ppo": Bar(
        metric="greedy/kept", after=("smollm2/feedback_sft", "smollm2/feedback_reward_model")
    ),
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


def run_recipe(recipe: str, seed: int, folder: Path, *overrides: str) -> int:
    """Runs a recipe in a folder that has a copy of all; returns the exit code."""
    keys = BARS[recipe].seeds if recipe in BARS else ("run.seed",)
    command = [
        *(sys.executable, "-m", "gcore_core", "run", f"recipes/{recipe}.yaml"),
        *overrides,
        *(f"{key}={seed}" for key in keys),
    ]
    environment = dict(os.environ)
    if any(".make." in key or ".config." in key for key in keys):
        environment["G_CORE_CACHE"] = str(folder / "cache")
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether a recipe learns what it is to learn.")
    parser.add_argument("recipe", choices=list(BARS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bar = BARS[args.recipe]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "recipes", folder / "recipes")
        for former in bar.after:
            if run_recipe(former, args.seed, folder):
                print(f"{former}, seed {args.seed}: the run failed")
                return 1
        began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        exit_code = run_recipe(args.recipe, args.seed, folder, "run.dir=run")
        wall_s, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        if exit_code:
            print(f"{args.recipe}, seed {args.seed}: the run ended with {exit_code}")
            return 1
        rows = read_metrics(folder / "run")
        evaluations = [row["evaluation"] for row in rows if row["evaluation"]]
    reason = shortfall(evaluations[0], evaluations[-1], bar)
    print(f"{args.recipe}, seed {args.seed}: {reason or 'learned'}")
    learned = {
        "recipe": args.recipe,
        "seed": args.seed,
        "metric": bar.metric,
        "evaluations": [evaluation[bar.metric] for evaluation in evaluations],
        "wall_s": round(wall_s),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
    }
    print(json.dumps(learned))
    return int(bool(reason))


if __name__ == "__main__":
    sys.exit(main())
