"""One rank of gcore-torch's trainer of a policy with a value head: steps, a state, numbers as JSON.

``python -m tests.support.shared_value_ranks RANK RANKS PACKING MODEL WORK RESUME``, by
test_shared_values.py. Two steps and a state, then one more step from the state in RESUME.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gcore_algorithms.advantages import Gae
from gcore_algorithms.config import GaeConfig
from gcore_language.shared_settings import ValueHeadSettings
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchSharedTrainer, make_trainer

from tests.support.language_models import Clip, make_context
from tests.support.value_ranks import records_of, weights_of


def open_trainer(
    model: Path,
    *,
    head: dict[str, Any] | None = None,
    lam: float = 0.9,
    facts: dict[str, Any] | None = None,
    **settings: Any,
) -> TorchSharedTrainer:
    """Opens a rank whose update is visible, with a head that gives values of size 1.

    head, settings: of the value head, and of the trainer.
    facts: of the worker's context.
    """
    config = TorchTrainerConfig(
        **{"learning_rate": 3e-3, "eps": 1e-3, "value_head_std": 0.5, "budget_tokens": 64}
        | settings,
        value_head=ValueHeadSettings(**{"coefficient": 0.3, "clip": 0.05} | (head or {})),
    )
    context = make_context(model, Clip(), **(facts or {}))
    context.parts["advantage"] = Gae(GaeConfig(lam=lam, whiten=True))
    trainer = make_trainer(config, context)
    assert isinstance(trainer, TorchSharedTrainer)
    return trainer


def train(trainer: TorchSharedTrainer, step: int, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """One step of which each rank has whole groups; the last rank one alone, of one minibatch."""
    records = records_of(step)
    rewards = np.random.default_rng(step).standard_normal(len(records))
    mine = [i for i, record in enumerate(records) if min(record.ordinal, ranks - 1) == rank]
    trainer.prepare([records[i] for i in mine], frozenset())
    return trainer.train(step, rewards[mine], 2, 2)


def run(rank: int, ranks: int, packing: str, model: Path, work: Path, resume: Path) -> Any:
    """Writes state/ and numbers.json under ``work``, and returns these numbers."""
    (work / "meet").mkdir(parents=True, exist_ok=True)
    facts = {
        "rank": rank,
        "ranks": ranks,
        "rendezvous": str(work / "meet"),
        "deterministic": packing == "exact",
    }
    trainer = open_trainer(model, facts=facts, packing="auto" if packing == "exact" else packing)
    metrics = [train(trainer, step, rank, ranks) for step in range(2)]
    trainer.save(work / "state")
    weights = weights_of(trainer, rank)  # type: ignore[arg-type]
    trainer.load(resume)
    metrics.append(train(trainer, trainer.version, rank, ranks))
    trainer.save_pretrained(work / "pretrained")
    trainer.close()
    numbers = {"metrics": metrics, "weights": weights}
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps(numbers))
    return numbers


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:7]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
