"""One rank of gcore-megatron's trainer in a process of its own.

``python -m tests.support.megatron_ranks SPEC RANK``; run by test_split.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.trainer import MegatronTrainer

from tests.support.language_models import make_context
from tests.support.megatron_trainers import inputs, make_objective


def run(spec: dict[str, Any], rank: int) -> None:
    """Two steps, a saved state, one step more; then, from the state in ``resume``, that last step
    again.

    Writes numbers.json and weights.npz (after two steps, after the third, after the resumed one) to
    ``spec["work"]``.
    """
    work = Path(spec["work"])
    config = MegatronTrainerConfig(**spec["settings"])
    slots = config.traits().replica_slots
    context = make_context(
        Path(spec["model"]),
        make_objective(*spec["objective"]),
        rank=rank,
        ranks=spec["ranks"],
        rendezvous=str(work) if spec["ranks"] > 1 else "",
        directory=str(work),
    )
    trainer = MegatronTrainer(config, context)
    replica, replicas = rank // slots, spec["ranks"] // slots
    found: dict[str, Any] = {"metrics": [], "kl": {}}
    weights: dict[str, np.ndarray] = {}

    def step(number: int) -> None:
        records, advantages = inputs(number)
        # uneven: the last replica has a quarter of one minibatch and nothing of the other
        last = np.array([i % 4 == 0 and record.minibatch == 0 for i, record in enumerate(records)])
        mine = (np.where(last, replicas - 1, 0) == replica).nonzero()[0]
        scalars = trainer.prepare([records[i] for i in mine], frozenset({"kl_k1"}))
        if number == 0:
            found["kl"] = {int(i): row["kl_k1"] for i, row in zip(mine, scalars, strict=True)}
        found["metrics"].append(trainer.train(number, advantages[mine], 2, 2))

    def note(when: str) -> None:
        for tensor, array in trainer.export_weights():
            if (array.size > 0) != (rank == 0):
                raise RuntimeError(f"rank {rank} exports {array.size} bytes of {tensor.name}")
            if rank == 0:
                weights[f"{when}/{tensor.name}"] = (
                    array.copy().view(np.float32).reshape(tensor.shape)
                )

    step(0)
    step(1)
    note("two")
    trainer.begin_save(work / "state")
    step(2)  # must not leak into what is being saved
    note("three")
    trainer.finish_save()
    if spec["resume"]:
        trainer.load(Path(spec["resume"]))
        step(trainer.version)
        note("resumed")
    trainer.save_pretrained(work / "pretrained")
    trainer.close()
    (work / f"numbers{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        np.savez(work / "weights.npz", **weights)


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
