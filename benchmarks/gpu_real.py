"""Measures real pretrained models on one GPU; ``gpu.py`` runs each part.

notes      recipes/smollm2/notes.yaml, to the two rules of three that each run on two cores learned
published  Qwen2.5-0.5B-Instruct learns GSM8K by GRPO on adapters, beside the end of a run of verl;
           the model and the rows are given by ``--model`` and ``--gsm8k``

``published`` is recipes/gsm8k_lora.yaml with the settings of verl's log: 64 prompts of 5 samples a
step, one update, adapters of rank 32 with alpha 32, learning rate 3e-5, a KL term of 0.001, an
entropy term of 0.001, answers of at most 1,024 tokens, one pass over 7,473 rows, which is 116
steps. The reward reads the last number behind "####" of an answer, verl's the first one.
https://github.com/eric-haibin-lin/verl-data (gsm8k, Qwen2.5-0.5B-bsz64_2, GRPO-LoRA, June 2025)
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from report import Claim

from gcore_core.contract.run_files import read_metrics
from gcore_core.run.checkpoints import Checkpoints

ROOT = Path(__file__).parents[1]
NOTES = ROOT / "recipes/smollm2/notes.yaml"
GSM8K = ROOT / "recipes/gsm8k_lora.yaml"
#: Accuracy at the end of verl's run, on all 1,319 rows of the test set.
VERL_ACCURACY = 0.543
#: Two standard errors of a share of 0.543 of 1,319 rows.
CHANCE = 0.027
VERL_STEPS = 116
#: Share of the rules that the notes come to on two cores. Two of seven runs there have missed it:
#: they never found the third rule, which comes by chance (docs/recipes/smollm2.md).
NOTES_KEPT = 0.9


def notes(folder: Path, device: str, *overrides: str) -> list[Claim]:
    """Returns what the recipe learns, in which time, and the rates of its stages.

    overrides: of a job that tests this script; it is held to no bar.
    """
    run = folder / "notes"
    shutil.rmtree(run, ignore_errors=True)  # one that was ended: it is timed as a whole
    began_s = time.monotonic()
    _run(
        *("run", str(NOTES), f"run.dir={run}", "plugins=[]", "cluster.devices=1"),
        *(f"roles.{role}.config.device={device}" for role in ("policy", "rollout")),
        *overrides,
    )
    seconds = time.monotonic() - began_s
    rows = read_metrics(run)
    return [
        *_learned("notes", rows, "greedy/kept", None if overrides else NOTES_KEPT),
        Claim("notes_seconds", seconds, "s, from the start", None if overrides else 180, "<="),
        *_rates("notes", rows),
    ]


def published(folder: Path, model: Path, gsm8k: Path, steps: int) -> list[Claim]:
    """Returns the accuracy on GSM8K's test set before, on the way, and after so many steps.

    A run that was ended goes on. The bar is for a whole pass over the rows.
    """
    run = folder / "published"
    if Checkpoints(run).steps():
        _run("resume", str(run), f"run.steps={steps}")
    else:
        shutil.rmtree(run, ignore_errors=True)  # it ended before it had saved anything
        on_cuda = [f"roles.{role}.config.device=cuda" for role in ("policy", "rollout")]
        words = gsm8k_overrides(folder, model, gsm8k)
        _run("run", str(GSM8K), f"run.dir={run}", f"run.steps={steps}", *words, *on_cuda)
    rows = read_metrics(run)
    bar = VERL_ACCURACY - CHANCE if steps >= VERL_STEPS else None
    return [*_learned("gsm8k", rows, "greedy/exact", bar), *_rates("gsm8k", rows)]


def gsm8k_overrides(folder: Path, model: Path, gsm8k: Path) -> list[str]:
    """Returns what makes the recipe the published run, on one GPU without vLLM and a network.

    folder: where the rows are written in the form of a job.
    gsm8k: a folder with train.jsonl and test.jsonl as OpenAI has published them.
    """
    train, test = (_written(gsm8k / f"{name}.jsonl", folder) for name in ("train", "test"))
    return [
        *("plugins=[]", "cluster.devices=1", "checkpoint.every=10", "evaluation.every=29"),
        f"roles.policy.model.path={model}",
        *("roles.rollout.use=torch", "roles.rollout.python=null"),
        "roles.rollout.config={max_new_tokens: 1024, dtype: bfloat16, max_batch: 320}",
        f"data={{use: core/jsonl, config: {{path: {train}}}}}",
        f"evaluation.data={{use: core/jsonl, config: {{path: {test}}}}}",
        "advantage.config.group_size=5",
        "objective.config.entropy_coefficient=0.001",
    ]


def _written(source: Path, folder: Path) -> Path:
    """Writes rows of GSM8K as a job reads them; returns the file."""
    target = folder / f"gsm8k_{source.name}"
    recipe = yaml.safe_load(GSM8K.read_text(encoding="utf-8"))
    template = recipe["data"]["config"]["template"]
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as out:
        for line in lines:
            row = json.loads(line)
            content = template.format(question=row["question"])
            answer = row["answer"].rpartition("#### ")[2].replace(",", "")
            messages = [{"role": "user", "content": content}]
            out.write(json.dumps({"prompt": messages, "answer": answer}) + "\n")
    return target


def _run(*words: str) -> None:
    """Runs g-core, whose progress is seen; raises subprocess.CalledProcessError."""
    subprocess.run([sys.executable, "-m", "gcore_core", *words], check=True, stdout=sys.stderr)


def _learned(name: str, rows: list[dict[str, Any]], metric: str, bar: float | None) -> list[Claim]:
    """Returns a metric of each evaluation; the bar is the last one's."""
    evaluated = [(row["step"], row["evaluation"][metric]) for row in rows if row["evaluation"]]
    *former, (_, last) = evaluated
    return [
        *(Claim(f"{name}_step_{step}", value, metric) for step, value in former),
        Claim(f"{name}_after", last, metric, bar),
    ]


def _rates(name: str, rows: list[dict[str, Any]]) -> list[Claim]:
    """Returns actions a second of each stage, the median over the steps after the first."""
    steps = [row["metrics"] for row in rows if row["step"] > 1]
    return [
        Claim(
            f"{name}_{stage}_actions_per_second",
            statistics.median(step["actions"] / step[f"seconds/{stage}"] for step in steps),
            "actions/s",
        )
        for stage in ("rollout", "prepare", "train")
    ] + [Claim(f"{name}_push_s", statistics.median(step["seconds/push"] for step in steps), "s")]
