"""One rank of gcore-torch's trainer of values: steps, a resumed state, and numbers as JSON.

``python -m tests.support.value_ranks RANK RANKS PACKING MODEL WORK RESUME``, by test_values.py. Two
steps and a state, then one more step from the state in RESUME, which another number of ranks wrote.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchValueTrainer, make_trainer

from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import make_context, make_records


class Squares:
    """Half the squared distance of values to the record's number, over trained states."""

    requires = frozenset({"values", "old_values"})

    def loss(self, columns: Any, current: Any) -> Any:
        mask = columns["mask"].float()
        loss = ((current["values"] - columns["advantage"]) ** 2 * mask).sum() / 2
        return loss, mask.sum(), {"value_loss": (loss.detach(), mask.sum())}

    def weight(self, columns: Any) -> Any:
        return columns["mask"].float().sum()


class AtTheEnd(Squares):
    """The same of the value after the last action, as a reward model has it."""

    requires = frozenset({"values"})

    def loss(self, columns: Any, current: Any) -> Any:
        rewards = current["values"][columns["end"]]
        loss = ((rewards - columns["advantage"][columns["end"]]) ** 2).sum() / 2
        return loss, columns["end"].sum().float(), {}

    def weight(self, columns: Any) -> Any:
        return columns["end"].sum().float()


def open_trainer(model: Path, objective: Any = None, **context: Any) -> TorchValueTrainer:
    settings = context.pop("settings", {})
    # eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
    # should be zero
    config = TorchTrainerConfig(
        **{"learning_rate": 3e-3, "eps": 1e-3, "value_head_std": 0.5, "budget_tokens": 64}
        | settings
    )
    made = make_trainer(config, make_context(model, objective or Squares(), **context))
    assert isinstance(made, TorchValueTrainer)
    return made


def records_of(step: int) -> list[TrainRecord]:
    """Makes a step's records in two minibatches, each of which has a group in each of its tiles."""
    return [replace(r, tile=r.ordinal // 2) for r in make_records(seed=step, minibatches=2)]


def train(trainer: TorchValueTrainer, step: int, rank: int, ranks: int) -> dict[str, float]:
    """One step of which each rank has whole groups; the last rank one alone, of one minibatch."""
    records = records_of(step)
    numbers = np.random.default_rng(step).standard_normal(len(records))
    mine = [i for i, r in enumerate(records) if min(r.ordinal, ranks - 1) == rank]
    trainer.prepare([records[i] for i in mine], frozenset())
    return trainer.train(step, numbers[mine], 2, 2)


def weights_of(trainer: TorchValueTrainer, rank: int = 0) -> dict[str, list[float]]:
    return {
        spec.name: array.copy().view(np.float32).tolist()
        for spec, array in trainer.export_weights()
        if not rank
    }


def run(
    rank: int, ranks: int, packing: str, model: Path, work: Path, resume: Path, **context: Any
) -> dict[str, Any]:
    """Writes state/ and numbers.json under ``work``, and returns these numbers."""
    (work / "meet").mkdir(parents=True, exist_ok=True)
    trainer = open_trainer(
        model,
        rank=rank,
        ranks=ranks,
        rendezvous=str(work / "meet"),
        settings={"packing": "auto" if packing == "exact" else packing},
        deterministic=packing == "exact",
        **context,
    )
    metrics = [train(trainer, step, rank, ranks) for step in range(2)]
    trainer.save(work / "state")
    weights = weights_of(trainer, rank)
    mine = [r for r in records_of(9) if min(r.ordinal, ranks - 1) == rank]
    values = [own.tolist() for own in trainer.values(mine)]
    trainer.load(resume)
    metrics.append(train(trainer, trainer.version, rank, ranks))
    trainer.save_pretrained(work / "pretrained")
    trainer.close()
    numbers = {"metrics": metrics, "weights": weights, "values": values}
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps(numbers))
    return numbers


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:7]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
