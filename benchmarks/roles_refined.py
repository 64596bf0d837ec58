"""Measures whether answers that are made from an earlier answer teach a policy more.

Two runs of the quickstart's task draw equally many actions, one plainly, one by the sampling
program ``refine``. Each is then asked the row's own prompt alone, by sampling: what counts is the
policy, not its refined answers.

A refined prompt is the problem, the best of the first answers, and the problem once more: the small
model's tokenizer knows the characters of the task and no words.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quickstart_runs import RECIPE, finished_rows, overrides_of, require_success, start
from report import Claim, repeated

#: The reward of the policy, of the row's own prompts at temperature 1.
REWARD = "sampled/exact"
SAMPLER = "{use: refine, config: {first: 4, draft: best, template: '{prompt}{answer}*{prompt}'}}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--refined-steps", type=int, default=32, help="steps of the plain run (default 32)"
    )
    parser.add_argument(
        "--refined-set", nargs="+", default=[], help="further overrides of the recipe, of both runs"
    )


def measure(args: argparse.Namespace) -> Sequence[Claim]:
    steps: int = args.refined_steps
    with tempfile.TemporaryDirectory() as temporary:
        pairs = [compared(Path(temporary), seed, steps, args.refined_set) for seed in args.seeds]

    def ratio(rounds: Sequence[tuple[float, float]]) -> float:
        return statistics.fmean(r for _, r in rounds) / statistics.fmean(p for p, _ in rounds)

    return [
        repeated("refined_sampling_reward_over_plain", pairs, ratio, "x", 1.05),
        Claim("refined_sampling_plain_reward", statistics.fmean(p for p, _ in pairs), "mean"),
        Claim("refined_sampling_refined_reward", statistics.fmean(r for _, r in pairs), "mean"),
    ]


def compared(folder: Path, seed: int, steps: int, words: Sequence[str]) -> tuple[float, float]:
    """Returns the rewards of the policies of a plain and of a refined run of equally many actions.

    The refined run takes a quarter more steps, since its answers may be shorter; its reward is that
    between the two evaluations beside which it had drawn as many actions as the plain run. The
    learning rate is constant: a schedule would depend on the number of steps.
    """
    plain = run(folder, seed, steps, "plain", *words)
    refined = run(
        folder, seed, steps + max(1, steps // 4), "refined", *words, f"sampling={SAMPLER}"
    )
    budget, reward = plain[-1]
    found = reward_at(refined, budget)
    print(f"seed {seed}: plain {reward:.3f}, refined {found:.3f}", file=sys.stderr)
    return reward, found


def run(folder: Path, seed: int, steps: int, name: str, *words: str) -> list[tuple[float, float]]:
    """Returns (actions drawn so far, reward of the policy) at each evaluation of a run."""
    directory = folder / f"{name}{seed}"
    log = folder / f"{name}{seed}.log"
    every = max(1, steps // 4)
    given = [
        f"run.steps={steps}",
        f"evaluation.every={every}",
        "evaluation.prompts=512",
        "roles.policy.config.schedule=constant",
        *words,
    ]
    arguments = ["run", str(RECIPE), *overrides_of(seed, directory), *given]
    require_success(start(arguments, folder, log), arguments, log)
    return curve(finished_rows(directory, steps))


def curve(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Returns (actions so far, reward) of each row with an evaluation.

    rows: of the metrics file. Every record of a step is trained on, so its actions are those drawn.
    """
    drawn = 0.0
    points = []
    for row in rows:
        drawn += row.get("metrics", {}).get("actions", 0.0)
        if REWARD in row.get("evaluation", {}):
            points.append((drawn, float(row["evaluation"][REWARD])))
    return points


def reward_at(points: Sequence[tuple[float, float]], budget: float) -> float:
    """Returns the reward after as many actions, on the line between two evaluations.

    points: (actions so far, reward). Behind the last of them it is the last reward.
    """
    for (before, low), (behind, high) in zip(points, points[1:], strict=False):
        if behind >= budget:
            return low + (high - low) * (budget - before) / (behind - before)
    return points[-1][1]
