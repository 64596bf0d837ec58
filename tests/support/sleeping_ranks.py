"""Ranks of a plugin's trainer, with sleep and without.

``found_by`` runs ``python -m tests.support.sleeping_ranks SPEC RANK`` for each rank. Three steps
are made from one state, first without a sleep. The second time every step begins after one, a state
is saved beside a sleep, and the last step goes on from that state.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.factories import import_attribute
from gcore_core.contract.weights_hash import WeightsHash
from gcore_core.testing.runs import run_together
from tests.support.language_models import Clip, make_advantages, make_context, make_records
from tests.support.lockstep_ranks import TRAINERS

LIMIT_S = 240
SETTINGS = {
    "learning_rate": 3e-3,
    "clip_grad_norm": 0.3,
    "weight_decay": 0.1,
    "budget_tokens": 160,
}


def found_by(
    trainer: str, model: Path, work: Path, *, ranks: int = 2, slots: int = 1, **settings: Any
) -> tuple[Any, Any]:
    """Returns the metrics of the steps and the weights' hash, without sleep and with it.

    trainer: a plugin's, such as ``torch``.
    slots: that hold a replica of the model together.
    """
    (work / "meet").mkdir(parents=True)
    spec = {
        "trainer": trainer,
        "settings": SETTINGS | settings,
        "model": str(model),
        "ranks": ranks,
        "slots": slots,
        "work": str(work),
    }
    (work / "spec.json").write_text(json.dumps(spec))
    programs = [["-m", __name__, str(work / "spec.json"), str(rank)] for rank in range(ranks)]
    run_together(programs, LIMIT_S)
    without, slept = json.loads((work / "numbers.json").read_text())
    return without, slept


def run(spec: dict[str, Any], rank: int) -> None:
    """Writes the metrics and the weights' hash of both ways; rank 0 only."""
    work = Path(spec["work"])
    factory, settings = map(import_attribute, TRAINERS[spec["trainer"]])
    context = make_context(
        Path(spec["model"]),
        Clip(beta=0.1),
        rank=rank,
        ranks=spec["ranks"],
        rendezvous=str(work / "meet"),
        directory=str(work),
    )
    trainer = factory(settings(**spec["settings"]), context)
    replica, replicas = rank // spec["slots"], spec["ranks"] // spec["slots"]
    train(trainer, 0, replica, replicas)
    trainer.save(work / "state")
    found = []
    for sleeps in (False, True):
        trainer.load(work / "state")
        metrics = []
        for step in (1, 2):
            if sleeps:
                trainer.sleep()
                trainer.wake()
            metrics.append(train(trainer, step, replica, replicas))
        if sleeps:
            _save_asleep(trainer, work / "late")
        metrics.append(train(trainer, 3, replica, replicas))
        found.append([metrics, _digest(trainer, rank)])
    trainer.close()
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps(found))


def train(trainer: Any, step: int, replica: int, replicas: int) -> dict[str, float]:
    """Makes the updates of one step from this replica's groups; returns the metrics of all."""
    records = make_records(groups=6, seed=step, minibatches=2)
    advantages = make_advantages(records, seed=step)
    mine = [i for i, record in enumerate(records) if record.ordinal // 2 % replicas == replica]
    trainer.prepare([records[i] for i in mine], frozenset({"kl_k1"}))
    metrics: dict[str, float] = trainer.train(step, advantages[np.array(mine)], 2, 2)
    metrics.pop("busy_s", None)
    return metrics


def _save_asleep(trainer: Any, directory: Path) -> None:
    """Saves, sleeps before all of it is written where the trainer can, and loads the state."""
    if hasattr(trainer, "begin_save"):
        trainer.begin_save(directory)
        trainer.sleep()
        trainer.finish_save()
    else:
        trainer.save(directory)
        trainer.sleep()
    trainer.wake()
    trainer.load(directory)


def _digest(trainer: Any, rank: int) -> str:
    weights = WeightsHash()
    for spec, content in trainer.export_weights():
        if rank == 0:
            weights.add(spec, content.copy().data)
    return weights.hexdigest()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
