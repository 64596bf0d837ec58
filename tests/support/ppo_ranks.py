"""One rank of a critic, then of the policy that learns by its values: steps, and numbers as JSON.

``python -m tests.support.ppo_ranks RANK RANKS MODEL WORK RESUME``, by tests of the critic. Each
role takes two steps, saves, then takes another from its state in RESUME. The critic leaves the
columns that it gives of each step under WORK, where the policy finds them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gcore_algorithms.advantages import Gae
from gcore_algorithms.config import GaeConfig, PpoClipConfig
from gcore_algorithms.critic.config import ValueLossConfig
from gcore_algorithms.critic.loss import ValueLoss
from gcore_algorithms.objectives import PpoClip
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchTrainer, make_trainer

from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import make_context, make_records

ADVANTAGE = GaeConfig(lam=0.9, gamma=0.99, whiten=True)
COLUMNS = ("values", "next_values")
STEPS = 2


def records_of(step: int) -> list[TrainRecord]:
    """Makes a step's records in two minibatches; every second one was cut."""
    made = make_records(seed=step, minibatches=2)
    return [replace(record, truncated=record.sample % 2 == 1) for record in made]


def rewards_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=len(records_of(step)))


def open_role(role: str, model: Path, **context: Any) -> TorchTrainer:
    """Opens a rank of the critic or of the policy."""
    # eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
    # should be zero
    settings = TorchTrainerConfig(
        learning_rate=1e-3, eps=1e-3, budget_tokens=64, value_head_std=0.3, clip_grad_norm=0.5
    )
    objective = PpoClip(PpoClipConfig()) if role == "policy" else ValueLoss(ValueLossConfig())
    return make_trainer(
        settings,
        make_context(
            model,
            role=role,
            parts={"objective": objective, "advantage": Gae(ADVANTAGE)},
            columns=COLUMNS if role == "critic" else (),
            given=COLUMNS,
            **context,
        ),
    )


def with_columns(
    records: list[TrainRecord], given: list[Mapping[str, np.ndarray]]
) -> list[TrainRecord]:
    return [
        replace(record, columns={**record.columns, **own})
        for record, own in zip(records, given, strict=True)
    ]


def run(rank: int, ranks: int, model: Path, work: Path, resume: Path) -> dict[str, Any]:
    """Writes each role's state and numbers.json under ``work``; returns role -> these numbers."""
    numbers = {
        role: run_role(rank, ranks, role, model, work, resume) for role in ("critic", "policy")
    }
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps(numbers))
    return numbers


def run_role(
    rank: int, ranks: int, role: str, model: Path, work: Path, resume: Path
) -> dict[str, Any]:
    (work / "meet").mkdir(parents=True, exist_ok=True)
    trainer = open_role(role, model, rank=rank, ranks=ranks, rendezvous=str(work / "meet"))
    metrics = []
    weights: dict[str, list[float]] = {}
    for step in range(STEPS + 1):
        if step == STEPS:
            trainer.save(work / role)
            weights = weights_of(trainer)
            trainer.load(resume / role)
        records = records_of(step)
        # uneven: the last rank has a group, the first all others
        mine = [i for i, r in enumerate(records) if min(r.ordinal, ranks - 1) == rank]
        own = [records[i] for i in mine]
        if role == "critic":
            given = trainer.annotate(own)  # type: ignore[attr-defined]
            keep(work / f"columns-{step}", mine, given)
        else:
            given = kept(work / f"columns-{step}", mine)
        trainer.prepare(with_columns(own, given), frozenset())
        metrics.append(trainer.train(step, rewards_of(step)[mine], 2, 1))
    trainer.close()
    return {"metrics": metrics, "weights": weights}


def weights_of(trainer: TorchTrainer) -> dict[str, list[float]]:
    return {
        spec.name: array.copy().view(np.float32).tolist()
        for spec, array in trainer.export_weights()
    }


def keep(directory: Path, places: list[int], given: list[Mapping[str, np.ndarray]]) -> None:
    """Writes the columns of each record to a file."""
    directory.mkdir(parents=True, exist_ok=True)
    for place, columns in zip(places, given, strict=True):
        np.savez(directory / f"{place}.npz", **columns)


def kept(directory: Path, places: list[int]) -> list[Mapping[str, np.ndarray]]:
    """Returns what ``keep`` wrote of these records."""
    return [dict(np.load(directory / f"{place}.npz")) for place in places]


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:6]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
