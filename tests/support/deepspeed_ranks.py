"""One rank of gcore-deepspeed's trainer: the named cases, and their numbers as files.

``python -m tests.support.deepspeed_ranks RANK RANKS CASES``, by test_ranks.py.
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
from gcore_algorithms.config import CispoConfig, GspoConfig, PpoClipConfig
from gcore_algorithms.objectives import Cispo, Gspo, PpoClip
from gcore_deepspeed.config import DeepSpeedTrainerConfig
from gcore_deepspeed.trainer import DeepSpeedTrainer, DeepSpeedValueTrainer, make_trainer
from gcore_language.context.settings import ContextSettings

from gcore_core.contract.errors import NonFiniteLoss
from tests.support.deepspeed_trainers import (
    SETTINGS,
    SHARED_OUT,
    Root,
    logprobs_of,
    make_records,
    train,
    weights_of,
)
from tests.support.language_models import Reinforce, make_advantages, make_context
from tests.support.value_ranks import Squares

OBJECTIVES: dict[str, Callable[[], Any]] = {
    "reinforce": Reinforce,
    "root": Root,
    "values": Squares,
    "ppo-clip": lambda: PpoClip(PpoClipConfig(clip_low=0.2, clip_high=0.28)),
    "gspo": lambda: Gspo(GspoConfig(clip_low=0.1, clip_high=0.1)),
    "cispo": lambda: Cispo(CispoConfig(clip_low=0.2, clip_high=0.2)),
}


class Case:
    """A case on one rank: what it was given, and where it leaves what it found."""

    def __init__(self, given: dict[str, Any], rank: int, ranks: int) -> None:
        self.given, self.rank, self.ranks = given, rank, ranks
        self.work = Path(given["work"])
        self.context = ContextSettings(**given.get("context", {}))

    def open(self, name: str = "trainer") -> DeepSpeedTrainer:
        given = self.given
        stage = given["config"]["stage"]
        meet = self.work / name
        meet.mkdir(exist_ok=True)
        context = make_context(
            given["model"],
            OBJECTIVES[given.get("objective", "reinforce")](),
            rank=self.rank,
            ranks=self.ranks,
            rendezvous=str(meet),
            engine=given.get("engine", SHARED_OUT if stage == 3 else {}),
            directory=str(self.work),
        )
        settings = {"dump_dir": str(self.work), "budget_tokens": 64}
        return make_trainer(
            DeepSpeedTrainerConfig(
                **{**settings, **SETTINGS, **given["config"]}, context=self.context
            ),
            context,
        )

    def mine(self, seed: int) -> tuple[list[Any], np.ndarray]:
        """Uneven: the last group of ranks has a quarter of the records, and so fewer micro-batches
        than the first. Without ``context`` each rank is a group.
        """
        group = self.rank // self.context.degree
        groups = self.ranks // self.context.degree
        records = make_records(seed=seed)
        advantages = make_advantages(records, seed=seed)
        places = np.flatnonzero((np.arange(len(records)) % 4 == 0) == (group == groups - 1))
        places = np.arange(len(records)) if groups == 1 else places
        return [records[i] for i in places], advantages[places]

    def leave(self, name: str, **found: Any) -> None:
        (self.work / f"{name}-rank{self.rank}.json").write_text(json.dumps(found))

    def leave_weights(self, name: str, trainer: DeepSpeedTrainer) -> None:
        weights = weights_of(trainer)
        if (self.rank == 0) != bool(weights):
            raise RuntimeError(f"rank {self.rank} exports {len(weights)} tensors")
        if weights:
            np.savez(self.work / f"{name}.npz", **weights)


def updates(case: Case) -> None:
    """Log-probs of rank 0's records, then two updates; the state before the second."""
    trainer = case.open()
    records, advantages = case.mine(0)
    trainer.prepare(records, frozenset())
    logprobs = [part.tolist() for part in logprobs_of(trainer, len(records))]
    metrics = [train(trainer, records, advantages)]
    case.leave_weights("first", trainer)
    trainer.save(case.work / "state")
    metrics.append(train(trainer, *case.mine(1), step=1))
    case.leave_weights("second", trainer)
    trainer.save_pretrained(case.work / "pretrained")
    trainer.close()
    built = [str(path) for path in case.work.rglob("torch_extensions*")]
    case.leave("updates", metrics=metrics, logprobs=logprobs, built=built)


def told(case: Case) -> None:
    """Log-probs of rank 0's records, and what an update tells."""
    trainer = case.open()
    records, advantages = case.mine(0)
    trainer.prepare(records, frozenset())
    logprobs = [part.tolist() for part in logprobs_of(trainer, len(records))]
    metrics = train(trainer, records, advantages)
    trainer.close()
    case.leave("told", metrics=metrics, logprobs=logprobs)


def values(case: Case) -> None:
    """Values of rank 0's records, then two updates of a model of values."""
    trainer = case.open()
    records, advantages = case.mine(0)
    assert isinstance(trainer, DeepSpeedValueTrainer)
    found = [own.tolist() for own in trainer.values(records)]
    metrics = [train(trainer, records, advantages)]
    metrics.append(train(trainer, *case.mine(1), step=1))
    case.leave_weights("second", trainer)
    trainer.close()
    case.leave("values", metrics=metrics, values=found)


def resume(case: Case) -> None:
    """Goes on from a state of others with the second update."""
    trainer = case.open("resumed")
    trainer.load(Path(case.given["state"]))
    metrics = train(trainer, *case.mine(1), step=trainer.version)
    case.leave_weights("resumed", trainer)
    trainer.close()
    case.leave("resume", metrics=[metrics])


def spoiled(case: Case) -> None:
    """A gradient that is not finite, an update that trains nothing, a loss that is not finite; then
    a good update.
    """
    trainer = case.open()
    records, advantages = case.mine(0)
    told: list[Any] = []

    def attempt(name: str, objective: Any, records: list[Any], advantages: np.ndarray) -> None:
        trainer._objective = objective
        try:
            told.append(train(trainer, records, advantages)["grad_norm"])
        except NonFiniteLoss as error:
            told.append(str(error).splitlines()[0])
        case.leave_weights(name, trainer)

    attempt("gradient", Root(), records, advantages)
    masked = [np.zeros_like(record.columns["action_mask"]) for record in records]
    idle = [
        replace(r, columns={**r.columns, "action_mask": m})
        for r, m in zip(records, masked, strict=True)
    ]
    attempt("masked", Reinforce(), idle, advantages)
    infinite = np.where((np.arange(len(records)) == 0) & (case.rank == 0), np.nan, advantages)
    attempt("loss", Reinforce(), records, infinite)
    attempt("after", Reinforce(), records, advantages)
    trainer.close()
    case.leave("spoiled", told=told)


def gathered(case: Case) -> None:
    """Exports in buckets: most numbers that were whole at once, and what was whole beyond the
    bucket at hand.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    trainer = case.open()
    train(trainer, *case.mine(0))
    parameters = list(trainer._engine._tensors.values())

    def whole() -> list[int]:
        return [p.ds_numel for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE]

    before = sum(whole())
    held = [whole() for _ in trainer.export_weights()]
    case.leave(
        "gathered",
        before=before,
        most=[max(parts) for parts in held],
        sums=[sum(parts) for parts in held],
    )
    case.leave_weights("exported", trainer)
    with trainer._engine._deepspeed.zero.GatheredParameters(parameters):
        if case.rank == 0:
            named = {
                name: p.detach().numpy().copy() for name, p in trainer._engine._tensors.items()
            }
            np.savez(case.work / "whole.npz", **named)
    trainer.close()


if __name__ == "__main__":
    for line in json.loads(Path(sys.argv[3]).read_text()):
        globals()[line["do"]](Case(line, int(sys.argv[1]), int(sys.argv[2])))
    if os.environ.get("COMPILERS") and list(Path(os.environ["COMPILERS"]).glob("called-*")):
        raise SystemExit("a compiler was called")
