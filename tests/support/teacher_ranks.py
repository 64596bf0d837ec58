"""One rank of gcore-torch's trainer that learns from a teacher's columns, its numbers as JSON.

``python -m tests.support.teacher_ranks RANK RANKS OBJECTIVE MODEL TEACHER WORK``. Two steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gcore_algorithms.teacher.annotator import FrozenModel
from gcore_algorithms.teacher.config import (
    TOP_IDS,
    TOP_LOGP,
    FrozenModelConfig,
    JensenShannonConfig,
    ReverseKlConfig,
)
from gcore_algorithms.teacher.objectives import JensenShannon, ReverseKl
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchTrainer

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import make_advantages, make_context, make_records

K = 5
COLUMNS = ("teacher_logp", TOP_IDS, TOP_LOGP)
OBJECTIVES: dict[str, Any] = {
    "reverse-kl": lambda: ReverseKl(ReverseKlConfig(reward_weight=0.5)),
    "jsd": lambda: JensenShannon(JensenShannonConfig(beta=0.3)),
    "jsd-with-reward": lambda: JensenShannon(JensenShannonConfig(beta=1.0, reward_weight=0.5)),
}
SETTINGS = {"learning_rate": 3e-3, "eps": 1e-3, "clip_grad_norm": 0.3, "budget_tokens": 64}


def annotated(records: Sequence[TrainRecord], model: Path, teacher: Path) -> list[TrainRecord]:
    """Returns the records with a teacher's columns."""
    context = WorkerContext(
        role="teacher",
        model={"path": str(teacher)},
        columns=COLUMNS,
        policy={"path": str(model)},
    )
    given = FrozenModel(FrozenModelConfig(top_k=K), context).annotate(records)
    return [
        replace(record, columns={**record.columns, **columns})
        for record, columns in zip(records, given, strict=True)
    ]


def run(rank: int, ranks: int, objective: str, model: Path, teacher: Path, work: Path) -> None:
    """Writes numbers.json under ``work``: the metrics of each step, and the weights after them."""
    (work / "meet").mkdir(parents=True, exist_ok=True)
    context = make_context(
        model,
        OBJECTIVES[objective](),
        rank=rank,
        ranks=ranks,
        rendezvous=str(work / "meet"),
        given=COLUMNS,
    )
    # eps as large as gradients are: else Adam makes a whole step of rounding
    trainer = TorchTrainer(TorchTrainerConfig(**SETTINGS), context)
    metrics = []
    for step in range(2):
        records = annotated(make_records(seed=step), model, teacher)
        advantages = make_advantages(records, seed=step)
        last = np.array([i % 4 == 0 for i in range(len(records))])
        mine = (np.where(last, ranks - 1, 0) == rank).nonzero()[0]
        trainer.prepare([records[i] for i in mine], frozenset())
        metrics.append(trainer.train(step, advantages[mine], 1, 1))
    weights = {
        spec.name: array.copy().view(np.float32).tolist()
        for spec, array in trainer.export_weights()
    }
    trainer.close()
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps({"metrics": metrics, "weights": weights}))


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:7]))
