"""Measures what the digits recipe learns, its cost to variety, and how sampler and trainer agree.

    python benchmarks/digits.py [--json] [--check] [--seeds 0:3]

Each seed is a whole ``g-core run recipes/digits.yaml``; the first one also makes the model, in a
cache of its own, so its wall time is what a user waits for. Reward, held-out judge and coverage are
of 500 images that the final weights draw by the deterministic sampler, 50 of each digit. A real
image that no training has seen is covered when a drawn one of its digit is nearer to it than its
fifth nearest real one. path KL is that of the last step's records to the weights before
reinforcement learning, exact, in nats over all pixels and recorded steps. The replay gap is the
largest difference between the log-probs of 240 x 9 transitions as they were sampled and as the
trainer computes them, first in the very batches in which they were sampled, then in other ones.
Means over the seeds have intervals. The worst seed, which bars are held to, has none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_diffusion import watch
from gcore_diffusion.config import (
    ClassifierConfig,
    DiffusionGeneratorConfig,
    DiffusionTrainerConfig,
)
from gcore_diffusion.engine import DiffusionEngine
from gcore_diffusion.generator import DiffusionGenerator
from gcore_diffusion.kernel import Kernel
from gcore_diffusion.rewards import Classifier
from gcore_diffusion.rows import transitions
from report import Claim, add_options, publish, repeated

from gcore_core.config.plan import load_plan
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt
from gcore_core.contract.run_files import read_metrics
from gcore_core.contract.scorer import ScoredRecord
from gcore_core.contract.trainer import TrainRecord
from gcore_core.run.make_model import make_model

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/digits.yaml"
DISTRIBUTIONS = ["gcore-core", "gcore-diffusion", "gcore-algorithms", "torch", "numpy"]
DIGITS = 10
OF_EACH = 50


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What 500 images are worth.

    reward: their mean reward.
    judged: share whose digit the held-out judge sees in them.
    coverage: share of held-out real images that are covered.
    """

    reward: float
    judged: float
    coverage: float


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What one run has given.

    wall_s, cpu_s: its seconds and processor seconds.
    path_kl: that of its last step, in nats.
    after: what the final weights draw.
    """

    wall_s: float
    cpu_s: float
    path_kl: float
    after: Drawn


def sampled(generator: DiffusionGenerator, count: int, *, greedy: bool) -> list[Finished]:
    """Returns ``count`` finished samples, digit after digit, in the order of their ordinals."""
    requests = [
        SampleRequest(
            ordinal=i,
            sample=0,
            seed=7_000_000 + i,
            prompt=Prompt(row=i % DIGITS, text=f"digit {i % DIGITS}", fields={"label": i % DIGITS}),
            greedy=greedy,
        )
        for i in range(count)
    ]
    generator.submit(requests)
    samples: list[Finished] = []
    while len(samples) < count:
        samples += generator.step()
    return sorted(samples, key=lambda record: record.request.ordinal)


def draw(weights: Path, taught: Path) -> Drawn:
    """Returns the worth of the images that some weights draw by the deterministic sampler.

    weights: directory of the model that draws.
    taught: directory of the model before reinforcement learning, which has judge and real images.
    """
    context = WorkerContext(role="rollout", model={"path": str(weights)})
    records = sampled(
        DiffusionGenerator(DiffusionGeneratorConfig(), context), DIGITS * OF_EACH, greedy=True
    )
    scored = [
        ScoredRecord(
            ordinal=0,
            sample=0,
            prompt=r.request.prompt,
            text="",
            status=r.status,
            columns=r.columns,
            media=r.media,
        )
        for r in records
    ]

    def score(**settings: Any) -> float:
        """Returns the mean score of the images under a classifier with these settings."""
        scorer = Classifier(
            ClassifierConfig(path=str(taught), **settings), WorkerContext(role="scorer")
        )
        return float(np.mean([score.value for score in scorer.score(scored)]))

    images = np.stack([record.media["image"] for record in records])
    labels = np.arange(len(images)) % DIGITS
    real = watch.RealImages.of_model(taught)
    if real is None:
        raise SystemExit(f"{taught} holds no real images")
    covered = [watch.coverage(images[labels == digit], real.of(digit)) for digit in range(DIGITS)]
    return Drawn(
        reward=score(),
        judged=score(file="judge.safetensors", measure="correct"),
        coverage=float(np.mean([value for value in covered if value is not None])),
    )


def replay_gaps(weights: Path) -> tuple[float, float]:
    """Returns the largest gaps of log-probs: (in the same batches, in micro-batches of 7
    transitions).
    """
    context = WorkerContext(role="policy", model={"path": str(weights)})
    settings = DiffusionGeneratorConfig()
    records = [
        TrainRecord(
            ordinal=r.request.ordinal, sample=0, minibatch=0, columns=r.columns, media=r.media
        )
        for r in sampled(DiffusionGenerator(settings, context), 240, greedy=False)
    ]

    def gap(rows_of: list[list[TrainRecord]], **changes: Any) -> float:
        """Returns the largest gap when these batches of records are computed one after the
        other.
        """
        engine = DiffusionEngine(DiffusionTrainerConfig(**changes), context)
        engine.kernel = Kernel(noise=settings.noise, scale=settings.scale, prediction="flow")
        largest = 0.0
        for batch in rows_of:
            rows = transitions(list(enumerate(batch)), torch.device("cpu"), 1.0)
            (logp,) = engine.logprobs([rows], "policy")
            if logp is not None:
                largest = max(largest, float((logp - rows.columns["rollout_logp"]).abs().max()))
        return largest

    steps = range(len(records[0].columns["steps"]))
    return gap([[only(record, k) for record in records] for k in steps]), gap(
        [records], budget_rows=7
    )


def only(record: TrainRecord, k: int) -> TrainRecord:
    """Returns the record as if its k-th stochastic step were its only one."""
    columns = record.columns
    shortened = {name: columns[name][k : k + 1] for name in ("steps", "logp", "action_mask")}
    return replace(
        record, columns={**columns, **shortened, "latents": columns["latents"][k : k + 2]}
    )


def run(seed: int, folder: Path, changes: Sequence[str] = ()) -> Seed:
    """Runs the recipe with a seed and measures what its final weights draw.

    changes: overrides of the recipe; none where a result is measured.
    """
    directory = folder / f"run-{seed}"
    overrides = [f"run.seed={seed}", f"run.dir={directory}", *changes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(folder / "cache")}
    began_s = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "gcore_core", "run", str(RECIPE), *overrides],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.perf_counter() - began_s
    if process.returncode:
        sys.exit(
            f"seed {seed} ended with {process.returncode}:\n"
            f"{process.stdout[-1000:]}{process.stderr[-2000:]}"
        )
    last = read_metrics(directory)[-1]["metrics"]
    taught = taught_in(folder, changes)
    return Seed(
        wall_s=wall_s,
        cpu_s=last["cpu_seconds"],
        path_kl=last["path_kl"],
        after=draw(directory / "weights", taught),
    )


def taught_in(folder: Path, changes: Sequence[str] = ()) -> Path:
    """Returns the directory of the model before reinforcement learning; makes it if it is not
    there.
    """
    make = load_plan(RECIPE, list(changes)).config["roles"]["policy"]["model"]["make"]
    return make_model(make, folder / "cache/models", lambda *_: None)


def claims_of(seeds: list[Seed], before: Drawn, gaps: tuple[float, float]) -> list[Claim]:
    """Returns the claims of all seeds."""
    mean = statistics.fmean
    return [
        Claim("reward_before", before.reward, "probability"),
        Claim("reward_after_min", min(s.after.reward for s in seeds), "probability", 0.9),
        repeated("reward_after_mean", [s.after.reward for s in seeds], mean, "probability"),
        Claim("heldout_judge_before", before.judged, "share"),
        Claim("heldout_judge_min", min(s.after.judged for s in seeds), "share", 0.95),
        repeated("heldout_judge_mean", [s.after.judged for s in seeds], mean, "share"),
        Claim("coverage_before", before.coverage, "share"),
        Claim("coverage_min", min(s.after.coverage for s in seeds), "share", 0.8),
        repeated("coverage_mean", [s.after.coverage for s in seeds], mean, "share"),
        Claim("path_kl_max", max(s.path_kl for s in seeds), "nats", 20, "<="),
        repeated("path_kl_mean", [s.path_kl for s in seeds], mean, "nats"),
        Claim("replay_logp_gap_same_batch", gaps[0], "nats a dimension", 0, "<="),
        Claim("replay_logp_gap_other_batch", gaps[1], "nats a dimension", 1e-6, "<="),
        Claim("seconds_after_install", seeds[0].wall_s, "s, with teaching", 180, "<="),
        Claim("cpu_seconds", max(s.cpu_s for s in seeds), "s, without teaching"),
        repeated("cpu_seconds_mean", [s.cpu_s for s in seeds], mean, "s, without teaching"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:3", help="first:end, default 0:3")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe; for a short run"
    )
    add_options(parser)
    args = parser.parse_args()
    first, end = map(int, args.seeds.split(":"))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seeds = [run(seed, folder, args.set) for seed in range(first, end)]
        taught = taught_in(folder, args.set)
        return publish(
            "digits",
            claims_of(seeds, draw(taught, taught), replay_gaps(taught)),
            args,
            DISTRIBUTIONS,
        )


if __name__ == "__main__":
    sys.exit(main())
