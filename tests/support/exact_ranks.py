"""One rank of gcore-torch's trainer in a deterministic run; it writes its numbers as JSON.

``python -m tests.support.exact_ranks RANK RANKS MODEL WORK``, by test_deterministic.py. Two
steps of two minibatches and two epochs in each packing. Tiles are dealt in turn, so that ranks have
unequally many of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchTrainer

from gcore_core.contract.errors import NonFiniteLoss
from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import Clip, make_advantages, make_context, make_records

Packing = Literal["auto", "padded"]
__all__ = ["NonFiniteLoss", "make_records"]
PACKINGS: tuple[Packing, ...] = ("auto", "padded")  # auto is flat here


def run(rank: int, ranks: int, packing: Packing, model: Path, work: Path) -> dict[str, Any]:
    """Returns the metrics of the steps, and hash and values of the weights after them."""
    (work / "meet").mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(model, packing, work, rank, ranks)
    metrics = [train(trainer, step, rank, ranks) for step in range(2)]
    weights = {spec.name: array.copy() for spec, array in trainer.export_weights()}
    trainer.close()
    digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights)))
    values = {name: array.view(np.float32).tolist() for name, array in weights.items()}
    return {"metrics": metrics, "sha256": digest.hexdigest(), "weights": values}


def train(trainer: TorchTrainer, step: int, rank: int, ranks: int) -> dict[str, float]:
    """Makes the updates of one step from this rank's tiles; returns the metrics of all ranks."""
    records = tiled(make_records(groups=6, seed=step, minibatches=2))
    advantages = make_advantages(records, seed=step)
    mine = [i for i, record in enumerate(records) if record.tile % ranks == rank]
    trainer.prepare([records[i] for i in mine], frozenset({"kl_k1"}))
    metrics = trainer.train(step, advantages[mine], 2, 2)
    metrics.pop("busy_s", None)
    return metrics


def make_trainer(
    model: Path,
    packing: Packing,
    work: Path,
    rank: int,
    ranks: int,
    *,
    deterministic: bool = True,
    **changes: Any,
) -> TorchTrainer:
    """Returns a trainer that clips, decays weights and has a reference."""
    context = make_context(
        model, Clip(beta=0.1), rank=rank, ranks=ranks, rendezvous=str(work / "meet")
    )
    context = dataclasses.replace(context, deterministic=deterministic)
    settings: dict[str, Any] = {
        "learning_rate": 3e-3,
        "clip_grad_norm": 0.3,
        "weight_decay": 0.1,
        "budget_tokens": 160,
        "packing": packing,
    }
    return TorchTrainer(TorchTrainerConfig(**(settings | changes)), context)


def tiled(records: list[TrainRecord]) -> list[TrainRecord]:
    """Returns the records with a tile each: groups of a minibatch, one after the other."""
    ordinals = {
        part: sorted({record.ordinal for record in records if record.minibatch == part})
        for part in (0, 1)
    }
    return [
        dataclasses.replace(record, tile=ordinals[record.minibatch].index(record.ordinal))
        for record in records
    ]


if __name__ == "__main__":
    own_rank, all_ranks = map(int, sys.argv[1:3])
    model_path, work_path = map(Path, sys.argv[3:5])
    numbers = {
        packing: run(own_rank, all_ranks, packing, model_path, work_path / packing)
        for packing in PACKINGS
    }
    if own_rank == 0:
        (work_path / "numbers.json").write_text(json.dumps(numbers))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
