"""Compares the quickstart with TRL: what it learns, how fast per CPU-second, in how much memory.

    python benchmarks/quickstart.py [--json] [--check] [--seeds 0:3] [--trl-python
    .tox/bench-trl/bin/python]

For each seed a model is taught, then trained twice, by ``g-core run recipes/quickstart.yaml`` and
by TRL's GRPOTrainer (benchmarks/trl_quickstart.py), one after the other on one machine; every
second seed TRL goes first. Both start from the same weights and get the same prompts, reward,
batch, updates and schedule, read from the resolved recipe; neither evaluates, and every process has
one thread. The weights that each leaves are scored alike, in a fresh process
(benchmarks/arithmetic_accuracy.py). Without a Python that has TRL, the claims about it are absent.

samples per CPU-second: samples of all steps but the first, over the user and system seconds that
*all* processes of the run took from the end of the first step to the end of the last; over all
seeds. samples_per_cpu_second_over_trl compares the two as they come: TRL generates once for two
updates, and then runs the policy forward over all of a step's samples for the log-probs before the
updates; ours does so for the second update's half of them.

..._same_forwards: with one update a step, where neither runs the policy forward but to sample and
to train: the same number of forward passes for each sample on both sides.

..._uncovered_model: with a model and records that our fast path for short records of the Llama
family does not cover (uncovered_model.py): a GPT-NeoX, records of about 1,024 tokens.

Peak memory is the largest sum, over a run's processes, of their proportional resident sets (PSS):
a page that several processes share counts once. It is looked at twice a second. Pages of shared
memory count, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import uncovered_model
from quickstart_runs import (
    RECIPE,
    environment,
    finished_rows,
    make_policy,
    overrides_of,
    require_success,
    start,
    wall_s,
)
from report import Claim, add_options, interval, publish

from gcore_core.config.plan import load_plan

ROOT = Path(__file__).parents[1]
WATCH_S = 0.5  # between two looks at a run's memory
#: One update a step: neither side needs log-probs from before it. Half as long as the recipe.
SAME_FORWARDS = ("controller.config.minibatches=1", "run.steps=60")
UNCOVERED = (
    "run.steps=3",
    "controller.config.prompts=4",
    "advantage.config.group_size=4",
    f"roles.rollout.config.max_new_tokens={uncovered_model.MAX_NEW_TOKENS}",
    f"roles.policy.model.make.path={uncovered_model.__file__}",
    *(
        f"{where}.config.path={uncovered_model.__file__}"
        for where in ("rewards.exact", "rewards.worked")
    ),
    "roles.policy.model.make.name=make",
    "rewards.exact.config.name=digit_share",
    "rewards.worked.config.name=digit_share",
)
DISTRIBUTIONS = ["gcore-core", "gcore-torch", "torch", "transformers", "trl", "numpy"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run of reinforcement learning, without its first step.

    samples: records that were trained on.
    cpu_s: processor seconds of all processes.
    wall_s: seconds.
    peak_memory_mib: largest sum of the proportional resident sets of all processes.
    after: what the final weights score; empty: they were not scored.
    startup_s: seconds until the first step begins; 0: not measured.
    logprob_gap_max: largest difference of a log-prob between generator and trainer, in nats.
    """

    samples: int
    cpu_s: float
    wall_s: float
    peak_memory_mib: float
    after: dict[str, float] = field(default_factory=dict)
    startup_s: float = 0.0
    logprob_gap_max: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Seed:
    """Everything measured with one seed.

    before: what the taught model scores.
    teaching_s: seconds that making the model took.
    ours, trl: the two runs; trl is None without a Python that has TRL.
    """

    before: dict[str, float]
    teaching_s: float
    ours: Trained
    trl: Trained | None


class Bench:
    """Runs the quickstart by G-Core and by TRL.

    folder: where runs and models lie.
    trl_python: an interpreter that has TRL; None: there is none.
    """

    def __init__(self, folder: Path, trl_python: Path | None) -> None:
        self._folder = folder
        self._trl_python = trl_python
        self._environment = environment(folder)
        self.has_trl = trl_python is not None

    def seed(self, seed: int) -> Seed:
        """Teaches a model, trains it by both and scores all weights."""
        overrides = [
            *overrides_of(seed, self._folder / f"run-{seed}"),
            "evaluation.every=0",
            "evaluation.data=null",
        ]
        plan = load_plan(RECIPE, overrides).config
        began_s = time.perf_counter()
        model = make_policy(plan, self._folder)
        teaching_s = time.perf_counter() - began_s
        trained = self._turns(plan, overrides, model, seed)
        scored = {
            name: replace(run, after=self._score(where)) for name, (run, where) in trained.items()
        }
        return Seed(
            before=self._score(model),
            teaching_s=teaching_s,
            ours=scored["ours"],
            trl=scored.get("trl"),
        )

    def pair(self, label: str, number: int, changes: Sequence[str]) -> tuple[Trained, Trained]:
        """Trains by both with other settings; returns (ours, TRL's), neither scored.

        label: names the runs' folders.
        number: of the round, whose seed it is.
        """
        overrides = [
            f"run.seed={number}",
            f"run.dir={self._folder / f'{label}-{number}'}",
            "evaluation.every=0",
            "evaluation.data=null",
            *changes,
        ]
        plan = load_plan(RECIPE, overrides).config
        trained = self._turns(plan, overrides, make_policy(plan, self._folder), number)
        return trained["ours"][0], trained["trl"][0]

    def uncovered_data(self) -> str:
        """Writes the other model's prompts and returns the override that names them."""
        path = self._folder / "uncovered.jsonl"
        uncovered_model.write_rows(path, 64)
        return f"data.config.path={path}"

    def _turns(
        self, plan: dict[str, Any], overrides: Sequence[str], model: Path, number: int
    ) -> dict[str, tuple[Trained, Path]]:
        """Trains by both, TRL first where the number is odd; returns runs and their weights."""
        runs: list[tuple[str, Callable[[], tuple[Trained, Path]]]] = [
            ("ours", lambda: self._ours(plan, overrides))
        ]
        if self.has_trl:
            runs.insert(1 - number % 2, ("trl", lambda: self._trl(plan, model)))
        return {name: run() for name, run in runs}

    def _ours(self, plan: dict[str, Any], overrides: Sequence[str]) -> tuple[Trained, Path]:
        """Trains by ``g-core run``."""
        directory = Path(plan["run"]["dir"])
        began_unix_s = time.time()
        arguments = ["run", str(RECIPE), *overrides]
        log = directory.with_suffix(".log")
        process = start(arguments, self._folder, log)
        peak_mib = watched_mib(process)
        require_success(process, arguments, log)
        rows = finished_rows(directory, plan["run"]["steps"])
        first = rows[1]
        last = rows[-1]
        trained = Trained(
            samples=samples_after_the_first_step(plan),
            cpu_s=last["metrics"]["cpu_seconds"] - first["metrics"]["cpu_seconds"],
            wall_s=wall_s(rows),
            peak_memory_mib=peak_mib,
            startup_s=rows[0]["time_unix_s"] - began_unix_s,
            logprob_gap_max=max(row["metrics"]["logprob_gap_max"] for row in rows[1:]),
        )
        return trained, directory / "weights"

    def _trl(self, plan: dict[str, Any], model: Path) -> tuple[Trained, Path]:
        """Trains by TRL's GRPOTrainer."""
        output = Path(f"{plan['run']['dir']}-trl")
        output.mkdir()
        command = [
            str(self._trl_python),
            str(ROOT / "benchmarks/trl_quickstart.py"),
            str(model),
            str(output),
            json.dumps(trl_settings(plan)),
        ]
        log = output.with_suffix(".log")
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=self._environment, stdout=file, stderr=file)
        peak_mib = watched_mib(process)
        if process.returncode:
            sys.exit(f"TRL ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        last = [line for line in log.read_text().splitlines() if line.startswith('{"cpu_s"')][-1]
        result = json.loads(last)
        trained = Trained(
            samples=samples_after_the_first_step(plan),
            cpu_s=result["cpu_s"],
            wall_s=result["wall_s"],
            peak_memory_mib=peak_mib,
        )
        return trained, output / "weights"

    def _score(self, model: Path) -> dict[str, float]:
        """Scores a model in a fresh process."""
        return self._last_line(
            [sys.executable, str(ROOT / "benchmarks/arithmetic_accuracy.py"), str(model)]
        )

    def _last_line(self, command: Sequence[str]) -> dict[str, float]:
        """Returns the JSON object that a command prints last; ends the benchmark when it fails."""
        process = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=False
        )
        if process.returncode:
            sys.exit(
                f"{' '.join(command)} ended with {process.returncode}:\n{process.stderr[-2000:]}"
            )
        return dict(json.loads(process.stdout.splitlines()[-1]))


def watched_mib(process: subprocess.Popen[bytes]) -> float:
    """Waits for a process and returns the peak MiB of it and all that it has started."""
    peak_mib = 0.0
    root = psutil.Process(process.pid)
    while process.poll() is None:
        peak_mib = max(peak_mib, tree_mib(root))
        time.sleep(WATCH_S)
    return peak_mib


def tree_mib(root: psutil.Process) -> float:
    """Returns the sum of the proportional resident sets of a process and its descendants."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss / 2**20
    return total


def samples_after_the_first_step(plan: dict[str, Any]) -> int:
    """Returns the number of samples of all steps but the first."""
    batch = plan["controller"]["config"]["prompts"] * plan["advantage"]["config"]["group_size"]
    return int((plan["run"]["steps"] - 1) * batch)


def trl_settings(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns what benchmarks/trl_quickstart.py takes, read from the recipe.

    Ends the benchmark where TRL cannot do the same.
    """
    trainer = plan["roles"]["policy"]["config"]
    loss = plan["objective"]["config"]
    steps = plan["controller"]["config"]
    conditions = {
        "epochs 1": steps["epochs"] == 1,
        "one clip for both sides": loss["clip_low"] == loss["clip_high"],
        "a linear schedule without warm-up": (trainer["schedule"], trainer["warmup_updates"])
        == ("linear", 0),
        "no weight decay": trainer["weight_decay"] == 0,
        "float32": trainer["dtype"] == "float32",
    }
    if unmet := [condition for condition, holds in conditions.items() if not holds]:
        sys.exit(f"trl_quickstart.py is written for a recipe with {', '.join(unmet)}")
    return {
        "data": plan["data"]["config"]["path"],
        "reward": plan["rewards"]["exact"]["config"]["name"],
        "seed": plan["run"]["seed"],
        "steps": plan["run"]["steps"],
        "prompts": steps["prompts"],
        "minibatches": steps["minibatches"],
        "group_size": plan["advantage"]["config"]["group_size"],
        "max_new_tokens": plan["roles"]["rollout"]["config"]["max_new_tokens"],
        "learning_rate": trainer["learning_rate"],
        "final_fraction": trainer["final_fraction"],
        "betas": trainer["betas"],
        "clip_grad_norm": trainer["clip_grad_norm"],
        "clip": loss["clip_low"],
    }


# -- claims ----------------------------------------------------------------------------------------


def rate(runs: Sequence[Trained]) -> float:
    """Returns the samples per CPU-second of all runs together."""
    return sum(run.samples for run in runs) / sum(run.cpu_s for run in runs)


def rate_over_trl(pairs: Sequence[tuple[Trained, Trained]]) -> float:
    """Returns our samples per CPU-second over TRL's, of pairs (ours, TRL's)."""
    return rate([ours for ours, _ in pairs]) / rate([trl for _, trl in pairs])


def memory_over_trl(pairs: Sequence[tuple[Trained, Trained]]) -> float:
    """Returns our largest peak of memory over TRL's, of pairs (ours, TRL's)."""
    return max(a.peak_memory_mib for a, _ in pairs) / max(b.peak_memory_mib for _, b in pairs)


def pair_claims(
    name: str, pairs: Sequence[tuple[Trained, Trained]], bar: float | None
) -> list[Claim]:
    """Returns the claims about pairs (ours, TRL's) whose settings have this name."""
    return [
        Claim(
            f"samples_per_cpu_second_over_trl_{name}",
            rate_over_trl(pairs),
            "ratio",
            bar,
            interval=interval(pairs, rate_over_trl),
        ),
        Claim(f"samples_per_cpu_second_{name}", rate([a for a, _ in pairs]), "samples/CPU-s"),
        Claim(f"trl_samples_per_cpu_second_{name}", rate([b for _, b in pairs]), "samples/CPU-s"),
    ]


def claims_of(seeds: Sequence[Seed]) -> list[Claim]:
    """Returns the claims of all seeds; those about TRL only where it ran."""
    ours = [seed.ours for seed in seeds]
    gains = [seed.ours.after["greedy_accuracy"] - seed.before["greedy_accuracy"] for seed in seeds]
    claims = [
        Claim(
            "accuracy_before_mean",
            statistics.mean(s.before["greedy_accuracy"] for s in seeds),
            "share, greedy",
        ),
        Claim(
            "accuracy_after_min",
            min(run.after["greedy_accuracy"] for run in ours),
            "share, greedy",
            0.9,
        ),
        Claim("accuracy_gain_min", min(gains), "share, greedy", 0.5),
        Claim(
            "worked_share_after_min",
            min(run.after["sampled_worked_share"] for run in ours),
            "share, sampled",
            0.8,
        ),
        Claim("samples_per_cpu_second", rate(ours), "samples/CPU-s", interval=interval(ours, rate)),
        Claim(
            "train_inference_logprob_gap_max",
            max(run.logprob_gap_max for run in ours),
            "nats",
            1e-4,
            "<=",
        ),
        Claim("peak_memory_mib", max(run.peak_memory_mib for run in ours), "MiB, all processes"),
        Claim(
            "sampled_accuracy_after_min",
            min(run.after["sampled_accuracy"] for run in ours),
            "share, sampled",
        ),
        Claim("startup_seconds", statistics.mean(run.startup_s for run in ours), "s"),
        Claim("teaching_seconds", statistics.mean(seed.teaching_s for seed in seeds), "s"),
        Claim("scoring_seconds", statistics.mean(run.after["seconds"] for run in ours), "s"),
        Claim("wall_seconds", statistics.mean(run.wall_s for run in ours), "s, all steps but one"),
    ]
    trl = [seed.trl for seed in seeds if seed.trl is not None]
    if trl:
        pairs = list(zip(ours, trl, strict=True))
        claims += [
            Claim("trl_samples_per_cpu_second", rate(trl), "samples/CPU-s"),
            Claim(
                "samples_per_cpu_second_over_trl",
                rate_over_trl(pairs),
                "ratio",
                2.0,
                interval=interval(pairs, rate_over_trl),
            ),
            Claim(
                "trl_accuracy_after_min",
                min(run.after["greedy_accuracy"] for run in trl),
                "share, greedy",
            ),
            Claim(
                "trl_peak_memory_mib", max(run.peak_memory_mib for run in trl), "MiB, all processes"
            ),
            Claim(
                "peak_memory_over_trl",
                memory_over_trl(pairs),
                "ratio",
                1.5,
                "<=",
                interval=interval(pairs, memory_over_trl),
            ),
            Claim(
                "trl_wall_seconds",
                statistics.mean(run.wall_s for run in trl),
                "s, all steps but one",
            ),
        ]
    return claims


PARTS = ("quickstart", "same_forwards", "uncovered_model")


def measure(bench: Bench, parts: Sequence[str], seeds: range, rounds: range) -> list[Claim]:
    """Measures parts and returns their claims; those that compare with TRL only where it is."""
    claims = []
    if "quickstart" in parts:
        claims += claims_of([bench.seed(seed) for seed in seeds])
    if "same_forwards" in parts and bench.has_trl:
        pairs = [bench.pair("same_forwards", number, SAME_FORWARDS) for number in rounds]
        claims += pair_claims("same_forwards", pairs, None)
    if "uncovered_model" in parts and bench.has_trl:
        changes = (*UNCOVERED, bench.uncovered_data())
        pairs = [bench.pair("uncovered_model", number, changes) for number in rounds]
        claims += pair_claims("uncovered_model", pairs, 1.0)
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:3", help="first:end, default 0:3")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".tox/bench-trl/bin/python")
    parser.add_argument(
        "--rounds", type=int, default=3, help="with other settings and the other model"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all of them"
    )
    parser.add_argument("--keep", type=Path, help="a new folder in which runs and models stay")
    add_options(parser)
    args = parser.parse_args()
    first, end = map(int, args.seeds.split(":"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.keep is not None:
            args.keep.mkdir(parents=True)
            folder = args.keep.resolve()
        bench = Bench(folder, args.trl_python if args.trl_python.exists() else None)
        claims = measure(bench, args.parts, range(first, end), range(args.rounds))
    return publish("quickstart", claims, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
