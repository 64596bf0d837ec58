"""One rank of gcore-torch's trainer: a step of an image-text model, and its numbers as JSON.

``python -m tests.support.torch_image_ranks RANK RANKS MODEL WORK``, by test_images.py. Only rank 0
has records with images.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from gcore_language.images import GRID, PIXELS
from gcore_language.tiny import VOCABULARY
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchTrainer

from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import Reinforce, make_advantages, make_context, make_records


def image_records() -> list[TrainRecord]:
    """Records of which the first half has an image of six tokens in front of its prompt."""
    draw, found = np.random.default_rng(3), []
    pixels = draw.standard_normal((24, 96)).astype(np.float32)
    place = VOCABULARY + np.array([0, 1, 1, 1, 1, 1, 1, 2], np.int32)
    for record in make_records():
        columns, media = dict(record.columns), {}
        if record.ordinal < 2:
            columns |= {
                "prompt_ids": np.concatenate([place, columns["prompt_ids"]]),
                GRID: np.array([[1, 4, 6]]),
            }
            media = {PIXELS: pixels}
        found.append(
            TrainRecord(
                ordinal=record.ordinal,
                sample=record.sample,
                minibatch=0,
                columns=columns,
                media=media,
            )
        )
    return found


def run(rank: int, ranks: int, model: Path, work: Path) -> None:
    """Writes numbers.json under ``work``."""
    context = make_context(model, Reinforce(), rank=rank, ranks=ranks, rendezvous=str(work))
    # eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
    # should be zero
    trainer = TorchTrainer(
        TorchTrainerConfig(learning_rate=3e-3, eps=1e-3, budget_tokens=64), context
    )
    records = image_records()
    advantages = make_advantages(records)
    mine = [
        i for i, record in enumerate(records) if (record.ordinal >= 2) == (rank == 1) or ranks == 1
    ]
    trainer.prepare([records[i] for i in mine], frozenset())
    metrics = trainer.train(0, advantages[mine], 1, 1)
    weights = {
        spec.name: array.copy().view(np.float32).tolist()
        for spec, array in trainer.export_weights()
    }
    trainer.close()
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps({"metrics": metrics, "weights": weights}))


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:5]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
