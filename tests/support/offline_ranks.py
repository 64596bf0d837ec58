"""One rank that trains on pairs, sharded or alone: its weights and metrics as JSON.

``python -m tests.support.offline_ranks RANK RANKS OBJECTIVE MODEL WORK``, by test_ranks.py of
gcore-algorithms. Two steps of two updates; the last of two ranks has one pair of six.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gcore_algorithms.offline.config import BradleyTerryConfig, DpoConfig, SftConfig
from gcore_algorithms.offline.objectives import BradleyTerry, Dpo, Sft
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import make_trainer

from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import VOCABULARY, make_context

OBJECTIVES: dict[str, Any] = {
    "sft": lambda: Sft(SftConfig(normalise="record")),
    "dpo": lambda: Dpo(DpoConfig()),
    "bradley-terry": lambda: BradleyTerry(BradleyTerryConfig(margin=1.0, centring=0.01)),
}
PAIRS = 6


def pairs(seed: int) -> list[TrainRecord]:
    """Pairs whose answers are of 1 to 12 tokens, half of them in each minibatch."""
    draw = np.random.default_rng(seed)
    records = []
    for ordinal in range(PAIRS):
        prompt = draw.integers(3, VOCABULARY, int(draw.integers(2, 9))).astype(np.int32)
        for sample in range(2):
            actions = int(draw.integers(1, 13))
            columns = {
                "prompt_ids": prompt,
                "action_ids": draw.integers(3, VOCABULARY, actions).astype(np.int32),
                "logp": np.zeros(actions, np.float32),
                "action_mask": np.ones(actions, np.uint8),
                "temperature": np.ones((), np.float32),
                "label": np.full(actions, ordinal / 4, np.float32),
            }
            records.append(
                TrainRecord(
                    ordinal=ordinal,
                    sample=sample,
                    minibatch=ordinal % 2,
                    columns=columns,
                    fresh=False,
                )
            )
    return records


def run(rank: int, ranks: int, objective: str, model: Path, work: Path, budget: int = 64) -> None:
    """Writes numbers.json under ``work``."""
    (work / "meet").mkdir(parents=True, exist_ok=True)
    context = make_context(
        model,
        OBJECTIVES[objective](),
        rank=rank,
        ranks=ranks,
        rendezvous=str(work / "meet") if ranks > 1 else "",
        given=("label",),
    )
    # eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
    # should be zero
    settings = TorchTrainerConfig(
        learning_rate=3e-3, eps=1e-3, budget_tokens=budget, value_head_std=0.5
    )
    trainer = make_trainer(settings, context)
    metrics = []
    for step in range(2):
        records = pairs(step)
        own = [r for r in records if ranks == 1 or (r.ordinal == PAIRS - 1) == (rank == 1)]
        evaluated = trainer.evaluate(own, np.ones(len(own)))
        trainer.prepare(own, frozenset())
        metrics.append(trainer.train(step, np.ones(len(own)), 2, 1))
        metrics[-1]["evaluated"] = evaluated["loss"][0] / evaluated["loss"][1]
    weights = {
        spec.name: array.copy().view(np.float32).tolist()
        for spec, array in trainer.export_weights()
    }
    trainer.close()
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps({"metrics": metrics, "weights": weights}))


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:6]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
