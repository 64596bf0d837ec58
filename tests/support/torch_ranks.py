"""One rank of gcore-torch's trainer: sharded steps, and their numbers as JSON.

``python -m tests.support.torch_ranks RANK RANKS PACKING MODEL WORK RESUME``, by test_ranks.py.
Three steps, a state saved while a fourth is made, then two more from the state in RESUME, which
another number of ranks wrote.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchTrainer

from tests.support.language_models import Clip, make_advantages, make_context, make_records

Packing = Literal["auto", "padded"]


class AdaptingClip(Clip):
    """Its loss grows with the entropies of the steps that it was shown."""

    def __init__(self, beta: float) -> None:
        super().__init__(beta=beta)
        self.entropies: list[float] = []

    def loss(self, columns: Any, current: Any) -> Any:
        loss, weight, metrics = super().loss(columns, current)
        return loss * (1.0 + sum(self.entropies)), weight, metrics

    def observe(self, metrics: Mapping[str, float]) -> None:
        self.entropies.append(metrics["entropy"])

    def state(self) -> dict[str, Any]:
        return {"entropies": list(self.entropies)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.entropies = list(state["entropies"])


def run(rank: int, ranks: int, packing: Packing, model: Path, work: Path, resume: Path) -> None:
    """Writes state/ and numbers.json under ``work``."""
    (work / "meet").mkdir(parents=True, exist_ok=True)
    context = make_context(
        model, AdaptingClip(beta=0.1), rank=rank, ranks=ranks, rendezvous=str(work / "meet")
    )
    # eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
    # should be zero
    settings = TorchTrainerConfig(
        learning_rate=3e-3,
        eps=1e-3,
        clip_grad_norm=0.3,
        weight_decay=0.1,
        budget_tokens=64,
        packing=packing,
    )
    trainer = TorchTrainer(settings, context)
    metrics = [_step(trainer, step, rank, ranks) for step in range(3)]
    trainer.begin_save(work / "state")
    weights = _weights(trainer, rank)
    _step(trainer, 3, rank, ranks)  # must not leak into what is being saved
    trainer.finish_save()
    trainer.load(resume)
    metrics += [
        _step(trainer, step, rank, ranks) for step in range(trainer.version, trainer.version + 2)
    ]
    after = _weights(trainer, rank)
    trainer.save_pretrained(work / "pretrained")
    trainer.close()
    if rank == 0:
        (work / "numbers.json").write_text(
            json.dumps({"metrics": metrics, "weights": weights, "after": after})
        )


def _step(trainer: TorchTrainer, step: int, rank: int, ranks: int) -> dict[str, float]:
    records = make_records(seed=step, minibatches=2)
    advantages = make_advantages(records, seed=step)
    # uneven: the last rank has a quarter of one minibatch and nothing of the other
    last = np.array([i % 4 == 0 and record.minibatch == 0 for i, record in enumerate(records)])
    mine = (np.where(last, ranks - 1, 0) == rank).nonzero()[0]
    trainer.prepare([records[i] for i in mine], frozenset({"kl_k1"}))
    return trainer.train(step, advantages[mine], 2, 2)


def _weights(trainer: TorchTrainer, rank: int) -> dict[str, list[float]]:
    found = {}
    for spec, array in trainer.export_weights():
        if (array.size > 0) != (rank == 0):
            raise RuntimeError(f"rank {rank} exports {array.size} bytes of {spec.name}")
        found[spec.name] = array.copy().view(np.float32).tolist()
    return found


if __name__ == "__main__":
    # Not of __main__: what the objective has learned stands under its module.
    from tests.support import torch_ranks

    layout: Any = sys.argv[3]
    torch_ranks.run(int(sys.argv[1]), int(sys.argv[2]), layout, *map(Path, sys.argv[4:7]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
