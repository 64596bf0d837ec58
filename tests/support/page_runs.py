"""Writes the files of runs that never ran, of any length, for tests and a benchmark of the page."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract import run_files
from gcore_core.contract.run_files import (
    Clock,
    Decided,
    Measured,
    RecordTrace,
    Stage,
    TrainedTokens,
)

#: What a model may write: it must be shown, and must not do anything.
EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)

PROCESSES = ("agent.0", "controller.0", "controller.1", "policy.0", "policy.1", "rollout.0")


def write_run(directory: Path, steps: int = 40, answers: int = 80, *, moves: bool = True) -> Path:
    """Writes a run and returns its directory.

    steps: those that it has made.
    answers: evaluated answers of all evaluations together; one of each evaluation is ``EVIL``.
    moves: whether its placement policy moved devices.
    """
    (directory / run_files.SAMPLES).mkdir(parents=True)
    (directory / run_files.TRACE).mkdir()
    config = {"run": {"name": EVIL, "steps": steps}, "controller": {"use": "core/sync"}}
    (directory / run_files.CONFIG).write_text(json.dumps(config))
    origins = {"run.name": "job.yaml, line 2", "run.steps": "override 'run.steps=40'"}
    (directory / run_files.ORIGINS).write_text(
        json.dumps(origins | {"controller.use": "default of the core"})
    )
    evaluated = sorted({round(i * steps / 10) for i in range(11)})
    write_lines(directory / run_files.METRICS, metrics_rows(steps, set(evaluated)))
    write_answers(directory, evaluated, answers)
    for shard in (0, 1):
        path = directory / run_files.TRACE / f"controller.{shard}.jsonl"
        write_lines(path, trace_lines(shard, min(steps, 200)))
    write_lines(directory / run_files.TOKENS, token_lines(steps))
    if moves:
        write_lines(directory / run_files.PLACEMENT, placement_lines(steps))
    return directory


def write_lines(path: Path, lines: Iterator[Any]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def metrics_rows(steps: int, evaluated: set[int]) -> Iterator[dict[str, Any]]:
    """Yields rows of sixty metrics, as a run with two trainer ranks writes them."""
    chance = random.Random(0)
    for step in range(steps + 1):
        rise = 1 - math.exp(-3 * step / steps)
        metrics = {} if step == 0 else metrics_of(step, rise, chance)
        evaluation = {"greedy/exact": rise, "sampled/exact": rise / 2, "greedy/length": 9.0}
        yield {
            "step": step,
            "version": step,
            "time_unix_s": 1.7e9 + 20.0 * step,
            "metrics": metrics,
            "evaluation": evaluation if step in evaluated else {},
        }


def metrics_of(step: int, rise: float, chance: random.Random) -> dict[str, float]:
    def near(value: float) -> float:
        return value * chance.uniform(0.8, 1.2)

    named = {
        "reward": near(rise),
        "reward/exact": near(rise),
        "length": near(200),
        "loss": chance.gauss(0, 0.01),
        "grad_norm": near(1),
        "learning_rate": 1e-6,
        "entropy": near(0.5),
        "kl": near(1e-4),
        "clip_share": near(0.02),
        "logprob_gap_max": near(1e-3),
        "balance_planned": near(1.02),
        "balance_achieved": near(1.1),
        "seconds/step": near(20),
        "seconds/rollout": near(12),
        "seconds/prepare": near(1),
        "seconds/train": near(6),
        "seconds/push": near(1),
        "placement/idle_share": near(0.2),
    }
    named |= {f"groups/number_{i}": near(i + 1) for i in range(20)}
    named |= {f"cpu_seconds/{name}": step * (i + 1.0) for i, name in enumerate(PROCESSES)}
    named |= {f"memory_mib/{name}": 100.0 * (i + 1) for i, name in enumerate(PROCESSES)}
    return named


def write_answers(directory: Path, evaluated: list[int], answers: int) -> None:
    """Writes answers of some dozens of words, equally many for each evaluation."""
    chance = random.Random(1)
    words = [f"word{i}" for i in range(300)]
    each = answers // len(evaluated) // 2 * 2
    for step in evaluated:
        rows = []
        for i in range(each):
            text = EVIL if i == 0 else " ".join(chance.choices(words, k=40))
            rows.append(
                {
                    "prompt": f"question {i // 2}",
                    "text": f"{text} step {step}",
                    "rewards": {"exact": float(chance.random() < 0.5)},
                    "mode": ("greedy", "sampled")[i % 2],
                    "status": "finished",
                }
            )
        rows[0]["arrays"] = {"picture": write_picture(directory, step)}
        write_lines(run_files.samples_path(directory, step), iter(rows))


def write_picture(directory: Path, step: int) -> str:
    """Writes a picture of 8 x 8 pixels and returns its name, as a row of samples has it."""
    name = f"{run_files.samples_path(directory, step).stem}/0-picture.npy"
    path = directory / run_files.SAMPLES / name
    path.parent.mkdir()
    np.save(path, np.full((8, 8, 3), step % 256, np.uint8))
    return name


def token_lines(steps: int) -> Iterator[TrainedTokens]:
    """Yields four records of every tenth step, of twenty tokens each, the last of them masked."""
    for step in range(0, steps, 10):
        for record in range(4):
            rollout = [-0.1 * (i + 1) for i in range(20)]
            yield TrainedTokens(
                step=step,
                ordinal=step * 8 + record // 2,
                sample=record % 2,
                replica=0,
                version=step,
                advantage=(-1.0) ** record,
                prompt_ids=[1, 2, 3],
                action_ids=list(range(20)),
                actions=20,
                rollout_logp=rollout,
                trainer_logp=[value - 0.01 for value in rollout],
                entropy=[0.5] * 20,
                masked=[19],
            )


def trace_lines(shard: int, steps: int) -> Iterator[Any]:
    """Yields a trace whose steps take 20 s: rollout 12, preparation 1, training 6, push 1.

    Replica 0 draws for 10 s of the 12, and the scorers work in the last 2.
    """
    yield Clock(shard, 1.7e9)
    for step in range(steps):
        start_s = 20.0 * step
        for sample in range(4):
            yield RecordTrace(
                step=step,
                ordinal=2 * step + shard,
                sample=sample,
                attempt=0,
                replica="rollout.0",
                sent_s=start_s,
                finished_s=start_s + 10,
                scored_s=start_s + 12,
                n_prompt=10,
                n_actions=20,
                status="finished",
                verdict="trained",
                chunk_bytes=1000,
            )
        edges = {"rollout": (0, 12), "prepare": (12, 13), "train": (13, 19), "push": (19, 20)}
        for name, (first_s, last_s) in edges.items():
            yield Stage(step, shard, name, start_s + first_s, start_s + last_s)


def placement_lines(steps: int) -> Iterator[Any]:
    """Yields decisions that give a judge one of four devices, and then two."""
    for step in range(steps):
        judges = 1 if step < steps // 2 else 2
        cells = {"rollout": [[i] for i in range(4 - judges)]}
        cells["judge"] = [[i] for i in range(4 - judges, 4)]
        yield Decided(
            step=step, mode="static", cells=cells, chosen="a", predicted_s={"a": 11.0}, reason=EVIL
        )
        yield Measured(step=step, measured_s=12.0, switch_s=0.5, waited={0: 1.0, 1: 2.0})
