"""One rank of gcore-diffusion's trainer: two steps on records that are in WORK.

``python -m tests.support.diffusion_ranks RANK RANKS MODEL WORK OBJECTIVE``, by test_ranks.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gcore_algorithms.config import PpoClipConfig
from gcore_algorithms.objectives import PpoClip
from gcore_diffusion.config import DiffusionTrainerConfig, NftConfig
from gcore_diffusion.forward import Nft
from gcore_diffusion.training import DiffusionTrainer
from safetensors.numpy import load_file, save_file

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.trainer import TrainRecord

OBJECTIVES: dict[str, Callable[[], Any]] = {
    "ppo_clip": lambda: PpoClip(PpoClipConfig()),
    "nft": lambda: Nft(NftConfig()),
}


def run(rank: int, ranks: int, model: Path, work: Path, objective: str) -> None:
    """Writes metrics-<ranks>.json and weights-<ranks>.safetensors."""
    held = load_file(work / "records.safetensors")
    count = 1 + max(int(key.split("/")[0]) for key in held)
    records = []
    for i in range(count):
        own = {key.split("/")[1]: array for key, array in held.items() if key.startswith(f"{i}/")}
        media = {name: own.pop(name) for name in ("condition", "image")}
        records.append(
            TrainRecord(
                ordinal=i // 3, sample=i % 3, minibatch=i // 3 % 2, columns=own, media=media
            )
        )
    context = WorkerContext(
        role="policy",
        rank=rank,
        ranks=ranks,
        rendezvous=str(work / "meet"),
        model={"path": str(model)},
        parts={"objective": OBJECTIVES[objective]()},
    )
    trainer = DiffusionTrainer(
        DiffusionTrainerConfig(learning_rate=3e-3, eps=1e-3, kl_coefficient=0.1), context
    )
    # uneven: the last rank has a quarter of the records of one minibatch, and none of the other
    last = np.array([i % 4 == 0 and record.minibatch == 0 for i, record in enumerate(records)])
    mine = np.flatnonzero(np.where(last, ranks - 1, 0) == rank)
    metrics = []
    for step in range(2):
        trainer.prepare([replace(records[i]) for i in mine], frozenset())
        advantages = np.where(np.arange(count) % 2, 1.0, -1.0)[mine]
        metrics.append(trainer.train(step, advantages, 2, 1))
    weights = {spec.name: array.view(np.float32) for spec, array in trainer.export_weights()}
    trainer.close()
    if rank == 0:
        (work / f"metrics-{ranks}.json").write_text(json.dumps(metrics))
        save_file(weights, work / f"weights-{ranks}.safetensors")


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
