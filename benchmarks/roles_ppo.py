"""PPO with a critic on the quickstart's task, and what the critic knows of the starting policy.

    python benchmarks/roles.py --parts ppo [--seeds 0 1 2] [--ppo-steps 120] [--critic-steps 30]

Two runs for each seed, both with the recipe's model, data and rewards:

    ppo      the whole recipe with ``algorithms/gae`` and a critic in place of GRPO; held-out
             accuracy, greedy, after the last step
    critic   the critic alone: its head start is the whole run, so all records are of the policy
             that the run begins with. Explained variance of the rewards (lambda 1) by the values,
             of each step's records before the critic has trained on them: the mean of the last five
             steps

A solved task has no variance to explain, so the second is not measured in the first run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quickstart_runs import RECIPE, finished_rows, overrides_of, require_success, start
from report import Claim, repeated

_LAST_STEPS = 5
#: The recipe with a critic. It learns faster than the policy, in more updates of a step.
CRITIC = (
    "plugins=[critic]",
    "advantage.use=algorithms/gae",
    "advantage.config.whiten=true",
    "roles.critic={use: torch, minibatches: 4, head_start: 5}",
    "roles.critic.config={learning_rate: 1e-3, schedule: linear, final_fraction: 0.2}",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ppo-steps", type=int, default=120, help="steps of PPO")
    parser.add_argument("--critic-steps", type=int, default=30, help="steps of the critic alone")
    parser.add_argument("--ppo-set", nargs="*", default=[], help="overrides of both runs")


def measure(args: argparse.Namespace) -> list[Claim]:
    with tempfile.TemporaryDirectory(prefix="g-core-ppo-") as name:
        folder = Path(name)
        accuracies = [_accuracy(folder, seed, args) for seed in args.seeds]
        explained = [_explained(folder, seed, args) for seed in args.seeds]
    return [
        Claim("ppo_accuracy_after_min", min(accuracies), "share", 0.9),
        repeated("ppo_accuracy_after_mean", accuracies, statistics.mean, "share"),
        Claim("explained_variance_after_min", min(explained), "share", 0.5),
        repeated("explained_variance_after_mean", explained, statistics.mean, "share"),
    ]


def _accuracy(folder: Path, seed: int, args: argparse.Namespace) -> float:
    """Returns the held-out accuracy, greedy, of the policy that PPO has trained."""
    rows = _run(folder, f"ppo-{seed}", seed, args.ppo_steps, args.ppo_set)
    return float(rows[-1]["evaluation"]["greedy/exact"])


def _explained(folder: Path, seed: int, args: argparse.Namespace) -> float:
    """Returns the explained variance of a critic that has trained beside a resting policy."""
    steps = args.critic_steps
    alone = [f"roles.critic.head_start={steps}", "advantage.config.lam=1", "evaluation.every=0"]
    rows = _run(folder, f"critic-{seed}", seed, steps, [*alone, *args.ppo_set])
    name = "critic/explained_variance"
    explained = [float(row["metrics"][name]) for row in rows if name in row["metrics"]]
    return statistics.mean(explained[-_LAST_STEPS:])


def _run(
    folder: Path, name: str, seed: int, steps: int, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """Runs the recipe with a critic; returns its metrics by step."""
    directory = folder / name
    words = ["run", str(RECIPE), *overrides_of(seed, directory), *CRITIC]
    words += [f"run.steps={steps}", *overrides]
    log = folder / f"{name}.log"
    require_success(start(words, folder, log), words, log)
    return finished_rows(directory, steps)
