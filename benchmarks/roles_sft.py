"""Supervised fine-tuning on the quickstart's model: tokens per CPU-second, beside TRL's SFTTrainer.

    python benchmarks/roles.py --parts sft [--seeds 0 1 2] [--sft-steps 200]
    [--trl-python .tox/bench-trl/bin/python]

Both train the same model on the same rows, prompts with worked answers, in batches of as many rows
with as many updates, one after the other on one machine, TRL first for odd seeds. All rows have as
many tokens, so that neither pads. Tokens are all of a row's, over user and system seconds of all
processes, from the end of the first step to the end of the last. Without ``--trl-python`` only ours
is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_runs import ROOT, answers, environment_of, job, train
from quickstart_runs import finished_rows, make_policy
from report import Claim, interval

from gcore_core.config.plan import load_plan

PROMPTS, MINIBATCHES = 64, 2
LEARNING_RATE = 5e-4


@dataclass(frozen=True)
class Rate:
    """tokens: trained in the measured steps. cpu_s: of all processes in these steps."""

    tokens: int
    cpu_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sft-steps", type=int, default=200)
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL 1.16")


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the rate over TRL's, where there is TRL, and the rates themselves."""
    made = answers()
    rows = [
        {"prompt": made.arithmetic.prompt_of(problem), "completion": made.worked(problem)}
        for problem in made.problems(held_out=False, count=PROMPTS * 32)
    ]
    # <bos> and the end token beside the characters
    tokens = len(rows[0]["prompt"]) + len(rows[0]["completion"]) + 2
    with tempfile.TemporaryDirectory(prefix="roles-sft-") as name:
        pairs = [_pair(Path(name), seed, args, rows, tokens) for seed in args.seeds]
    claims = [Claim("sft_tokens_per_cpu_second", rate([own for own, _ in pairs]), "tokens/CPU-s")]
    both = [(own, other) for own, other in pairs if other is not None]
    if both:
        claims += [
            Claim(
                "sft_tokens_per_cpu_second_over_trl",
                over(both),
                "ratio",
                1.2,
                interval=interval(both, over),
            ),
            Claim("trl_sft_tokens_per_cpu_second", rate([trl for _, trl in both]), "tokens/CPU-s"),
        ]
    return claims


def rate(runs: Sequence[Rate]) -> float:
    """Returns the tokens per CPU-second of all runs together."""
    return sum(run.tokens for run in runs) / sum(run.cpu_s for run in runs)


def over(pairs: Sequence[tuple[Rate, Rate]]) -> float:
    """Returns our rate over TRL's."""
    return rate([own for own, _ in pairs]) / rate([trl for _, trl in pairs])


def _pair(
    folder: Path, seed: int, args: argparse.Namespace, rows: list[dict[str, Any]], tokens: int
) -> tuple[Rate, Rate | None]:
    settings = job(
        folder,
        f"sft-{seed}",
        "sft",
        rows,
        seed=seed,
        steps=args.sft_steps,
        prompts=PROMPTS,
        minibatches=MINIBATCHES,
    )
    settings["objective"] = {"use": "offline/sft"}
    # Else the start of a process that waits for a fault is counted, where the run takes a minute.
    settings["run"]["spares"] = "never"
    settings["roles"]["policy"]["config"] = {"learning_rate": LEARNING_RATE, "resplit_every": 0}
    trained = (args.sft_steps - 1) * PROMPTS * tokens
    turns: list[tuple[str, Callable[[], Rate]]] = [("own", lambda: _own(folder, settings, trained))]
    if args.trl_python:
        trl = lambda: _trl(folder, settings, args.trl_python, trained)  # noqa: E731
        turns.insert(1 - seed % 2, ("trl", trl))
    rates = {name: run() for name, run in turns}
    return rates["own"], rates.get("trl")


def _own(folder: Path, settings: dict[str, Any], trained: int) -> Rate:
    directory, _ = train(folder, settings)
    rows = finished_rows(directory, settings["run"]["steps"])
    spent_s = [row["metrics"]["cpu_seconds"] for row in (rows[1], rows[-1])]
    return Rate(trained, spent_s[1] - spent_s[0])


def _trl(folder: Path, settings: dict[str, Any], python: Path, trained: int) -> Rate:
    file = folder / "trl.yaml"
    file.write_text(json.dumps(settings))
    model = make_policy(load_plan(file, []).config, folder)
    told = {
        "data": settings["data"]["config"]["path"],
        "seed": settings["run"]["seed"],
        "updates": settings["run"]["steps"] * MINIBATCHES,
        "first": MINIBATCHES,
        "batch": PROMPTS // MINIBATCHES,
        "learning_rate": LEARNING_RATE,
    }
    output = folder / f"trl-{settings['run']['name']}"
    command = [str(python), str(ROOT / "benchmarks/trl_sft.py"), str(model), str(output)]
    done = subprocess.run(
        [*command, json.dumps(told)],
        env=environment_of(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"TRL ended with {done.returncode}:\n{done.stderr[-2000:]}")
    last = [line for line in done.stdout.splitlines() if line.startswith('{"cpu_s"')][-1]
    return Rate(trained, float(json.loads(last)["cpu_s"]))
