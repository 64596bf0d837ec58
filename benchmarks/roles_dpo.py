"""DPO on the quickstart's task: by how much pairs of answers raise the accuracy of a policy.

    python benchmarks/roles.py --parts dpo [--seeds 0 1 2] [--dpo-steps 60] [--dpo-rows 2048]

For each seed the quickstart's model, taught to guess most of the time, is trained by
``offline/dpo`` on pairs of a right worked answer and a wrong careless one. Accuracy is
the share of held-out problems whose greedy answer is right, before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from offline_runs import answers, job, train
from quickstart_runs import environment
from report import Claim, repeated

ROOT = Path(__file__).parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dpo-steps", type=int, default=60)
    parser.add_argument("--dpo-rows", type=int, default=2048)


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the least gain of accuracy over the seeds, and the accuracies."""
    with tempfile.TemporaryDirectory(prefix="roles-dpo-") as name:
        folder = Path(name)
        rows = list(answers().pairs(held_out=False))[: args.dpo_rows]
        scored = [_seed(folder, seed, args.dpo_steps, rows) for seed in args.seeds]
    gains = [after - before for before, after in scored]
    return [
        Claim("dpo_accuracy_gain_min", min(gains), "share", 0.2),
        repeated("dpo_accuracy_gain_mean", gains, statistics.mean, "share"),
        Claim("dpo_accuracy_after_min", min(after for _, after in scored), "share"),
    ]


def _seed(folder: Path, seed: int, steps: int, rows: list[dict[str, str]]) -> tuple[float, float]:
    """Returns the accuracy before and after."""
    settings = job(folder, f"dpo-{seed}", "pairs", rows, seed=seed, steps=steps)
    settings["objective"] = {"use": "offline/dpo", "config": {"beta": 0.1}}
    settings["roles"]["policy"]["config"] = {"learning_rate": 2e-4, "schedule": "linear"}
    directory, model = train(folder, settings)
    return _accuracy(folder, model), _accuracy(folder, directory / "weights")


def _accuracy(folder: Path, model: Path) -> float:
    command = [sys.executable, str(ROOT / "benchmarks/arithmetic_accuracy.py"), str(model)]
    done = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["greedy_accuracy"])
