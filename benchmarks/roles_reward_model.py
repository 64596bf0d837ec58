"""A reward model of pairs on the quickstart's task: how often it prefers the right answer.

    python benchmarks/roles.py --parts reward_model [--seeds 0 1 2] [--rm-steps 120]
    [--rm-rows 32768]

For each seed the quickstart's model is trained by ``offline/bradley-terry`` on pairs of a right and
a wrong worked answer; the wrong one has a mistake in one addition, and the totals after it follow
from that. Agreement is the share of kept-out pairs whose right answer gets the higher reward from
``rewards.<name>: {use: torch}``, which opens what the run has left.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offline_runs import answers, job, train
from report import Claim, repeated

HELDOUT_PAIRS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rm-steps", type=int, default=120)
    parser.add_argument("--rm-rows", type=int, default=32768)


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the least agreement over the seeds."""
    with tempfile.TemporaryDirectory(prefix="roles-reward-model-") as name:
        shares = [_seed(Path(name), seed, args) for seed in args.seeds]
    return [
        Claim("reward_model_agreement_min", min(shares), "share", 0.95),
        repeated("reward_model_agreement_mean", shares, statistics.mean, "share"),
    ]


def _seed(folder: Path, seed: int, args: argparse.Namespace) -> float:
    rows = list(_pairs(args.rm_rows, held_out=False))
    settings = job(folder, f"rm-{seed}", "pairs", rows, seed=seed, steps=args.rm_steps, prompts=256)
    settings["objective"] = {"use": "offline/bradley-terry", "config": {"centring": 0.01}}
    settings["roles"]["rollout"] = {"use": "offline/texts"}
    settings["roles"]["policy"]["config"] = {
        "learning_rate": 2e-3,
        "schedule": "linear",
        "warmup_updates": 50,
    }
    directory, _ = train(folder, settings)
    return agreement(directory / "weights", list(_pairs(HELDOUT_PAIRS, held_out=True)))


def agreement(model: Path, rows: list[dict[str, Any]]) -> float:
    """Returns the share of pairs whose chosen answer the saved reward model prefers."""
    from gcore_torch.config import TorchRewardConfig
    from gcore_torch.reward import TorchReward

    from gcore_core.contract.context import WorkerContext
    from gcore_core.contract.records import Prompt
    from gcore_core.contract.scorer import ScoredRecord

    reward = TorchReward(TorchRewardConfig(path=str(model)), WorkerContext(role="scorer"))
    values = []
    for name in ("chosen", "rejected"):
        records = [
            ScoredRecord(
                ordinal=i,
                sample=0,
                prompt=Prompt(row=i, text=row["prompt"]),
                text=row[name],
                status="finished",
                columns={},
            )
            for i, row in enumerate(rows)
        ]
        values.append([score.value for score in reward.score(records)])
    return statistics.mean(chosen > rejected for chosen, rejected in zip(*values, strict=True))


def _pairs(count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    made = answers()
    draw = random.Random(2)
    for problem in made.problems(held_out=held_out, count=count):
        yield {
            "prompt": made.arithmetic.prompt_of(problem),
            "chosen": made.worked(problem),
            "rejected": made.worked_wrong(problem, draw),
        }
