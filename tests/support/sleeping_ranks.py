"""One of two ranks of gcore-torch's trainer that share a model, with sleep and without.

``python -m tests.support.sleeping_ranks RANK MODEL WORK``, by test_trainer_sleep.py. Two steps are
made from one state, first without a sleep, then with one before each step and a save in between.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gcore_torch.trainer import TorchTrainer

from gcore_core.contract.weights_hash import WeightsHash
from tests.support import exact_ranks


def main(rank: int, model: Path, work: Path) -> None:
    """Writes the weights' hash and the numbers of both ways; rank 0 only."""
    trainer = exact_ranks.make_trainer(model, "auto", work, rank, 2, deterministic=False)
    exact_ranks.train(trainer, 0, rank, 2)
    trainer.save(work / "state")
    found = []
    for sleeps in (False, True):
        trainer.load(work / "state")
        metrics = []
        for step in (1, 2):
            if sleeps:
                trainer.sleep()
                trainer.wake()
            metrics.append(exact_ranks.train(trainer, step, rank, 2))
            if sleeps:
                trainer.begin_save(work / "late")
                trainer.sleep()
                trainer.finish_save()
                trainer.wake()
        found.append([metrics, _digest(trainer, rank)])
    trainer.close()
    if rank == 0:
        (work / "numbers.json").write_text(json.dumps(found))


def _digest(trainer: TorchTrainer, rank: int) -> str:
    weights = WeightsHash()
    for spec, content in trainer.export_weights():
        if rank == 0:
            weights.add(spec, content.copy().data)
    return weights.hexdigest()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
