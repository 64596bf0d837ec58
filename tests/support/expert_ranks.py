"""One rank of gcore-torch's trainer with a mixture of experts, and its numbers as JSON.

``python -m tests.support.expert_ranks RANK RANKS MODEL WORK``, by plugins/gcore-torch's
test_experts.py. Three steps with replayed routers and the load-balancing loss.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchTrainer

from gcore_core.contract.columns import ROUTING
from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import Clip, make_advantages, make_context, make_records


def run(rank: int, ranks: int, model: Path, work: Path) -> None:
    """Writes numbers.json under ``work``."""
    context = make_context(
        model, Clip(beta=0.1), rank=rank, ranks=ranks, rendezvous=str(work / "meet")
    )
    # eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
    # should be zero
    settings = TorchTrainerConfig(
        learning_rate=3e-3,
        eps=1e-3,
        clip_grad_norm=0.3,
        router_aux_loss=0.1,
        budget_tokens=64,
    )
    trainer = TorchTrainer(settings, context)
    metrics = [_step(trainer, step, rank, ranks) for step in range(3)]
    weights = {
        spec.name: array.copy().view(np.float32).tolist()
        for spec, array in trainer.export_weights()
    }
    trainer.close()
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps({"metrics": metrics, "weights": weights}))


def _step(trainer: TorchTrainer, step: int, rank: int, ranks: int) -> dict[str, float]:
    """The second step's records have no experts, so that those of the routers are counted."""
    records = [routed(record, step) for record in make_records(seed=step, minibatches=2)]
    advantages = make_advantages(records, seed=step)
    # uneven: the last rank has a quarter of one minibatch and nothing of the other
    last = np.array([i % 4 == 0 and record.minibatch == 0 for i, record in enumerate(records)])
    mine = (
        np.where(last, ranks - 1, np.arange(len(records)) % max(1, ranks - 1)) == rank
    ).nonzero()[0]
    trainer.prepare([records[i] for i in mine], frozenset({"kl_k1"}))
    return trainer.train(step, advantages[mine], 2, 2)


def routed(record: TrainRecord, step: int) -> TrainRecord:
    """Returns a record with experts that no router would choose, and in step 1 as it is."""
    if step == 1:
        return record
    columns = record.columns
    tokens = len(columns["prompt_ids"]) + len(columns["action_ids"]) - 1
    draw = np.random.default_rng([step, record.ordinal, record.sample])
    routing = draw.permuted(np.tile(np.arange(8), (tokens, 2, 1)), axis=-1)[..., :2]
    return replace(record, columns={**columns, ROUTING: routing.astype(np.uint8)})


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
