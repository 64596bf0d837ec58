"""One rank of a trainer with a mixture of experts, and its numbers as JSON.

``python -m tests.support.expert_ranks RANK RANKS MODEL WORK [SPEC]``, by tests of the plugins
gcore-torch and gcore-megatron. Three steps with replayed routers and the load-balancing loss.

SPEC is JSON: ``trainer``, ``config`` and ``settings`` of another trainer than gcore-torch's, and
``resume``, the directory of a state after two steps from which the last one is made again.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.columns import ROUTING
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.trainer import TrainRecord
from gcore_core.contract.traits import traits_of
from tests.support.language_models import Clip, make_advantages, make_context, make_records

#: eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
#: should be zero
SETTINGS = {
    "learning_rate": 3e-3,
    "eps": 1e-3,
    "clip_grad_norm": 0.3,
    "router_aux_loss": 0.1,
    "budget_tokens": 64,
}
TORCH = {
    "trainer": "gcore_torch.trainer:TorchTrainer",
    "config": "gcore_torch.config:TorchTrainerConfig",
    "settings": {},
}


def run(rank: int, ranks: int, model: Path, work: Path, spec: dict[str, Any]) -> None:
    """Writes numbers.json under ``work``, and with ``resume`` the state after two steps."""
    context = make_context(
        model,
        Clip(beta=0.1),
        rank=rank,
        ranks=ranks,
        rendezvous=str(work / "meet"),
        directory=str(work),
    )
    config = import_attribute(spec["config"])(**{**SETTINGS, **spec["settings"]})
    trainer = import_attribute(spec["trainer"])(config, context)
    slots = traits_of(config).replica_slots
    place = rank // slots, ranks // slots
    found: dict[str, Any] = {"metrics": [_step(trainer, step, *place) for step in range(2)]}
    if "resume" in spec:
        trainer.begin_save(work / "state")
    found["metrics"].append(_step(trainer, 2, *place))  # must not leak into what is being saved
    found["weights"] = _weights(trainer)
    if "resume" in spec:
        trainer.finish_save()
    if spec.get("resume"):
        trainer.load(Path(spec["resume"]))
        found["metrics_again"] = _step(trainer, trainer.version, *place)
        found["weights_again"] = _weights(trainer)
    trainer.close()
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps(found))


def _weights(trainer: Any) -> dict[str, list[Any]]:
    """The weights on the first rank; the others export none."""
    return {
        spec.name: array.copy().view(np.float32).tolist()
        for spec, array in trainer.export_weights()
    }


def _step(trainer: Any, step: int, replica: int, replicas: int) -> dict[str, float]:
    """The second step's records have no experts, so that those of the routers are counted."""
    records = [routed(record, step) for record in make_records(seed=step, minibatches=2)]
    advantages = make_advantages(records, seed=step)
    # uneven: the last replica has a quarter of one minibatch and nothing of the other
    last = np.array([i % 4 == 0 and record.minibatch == 0 for i, record in enumerate(records)])
    mine = (
        np.where(last, replicas - 1, np.arange(len(records)) % max(1, replicas - 1)) == replica
    ).nonzero()[0]
    trainer.prepare([records[i] for i in mine], frozenset({"kl_k1"}))
    metrics: dict[str, float] = trainer.train(step, advantages[mine], 2, 2)
    return metrics


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
    given = json.loads(sys.argv[5]) if len(sys.argv) > 5 else TORCH
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), given)
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
