"""How a trainer on several ranks packs long-tailed records, beside what first-come packing gives.

``waits_of`` runs ``python -m tests.support.lockstep_ranks TRAINER RANK RANKS MODEL WORK`` for each
rank. TRAINER is a plugin's trainer, such as ``torch``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gcore_language.packing import Batch, Sample, micro_batches
from gcore_language.training import Placed
from gcore_testing.runs import run_together

from gcore_core.contract.factories import import_attribute
from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import Reinforce, make_context

RANKS = 2
BUDGET_TOKENS = 120
#: Plugin -> its trainer and the trainer's settings, by reference.
TRAINERS = {
    "torch": ("gcore_torch.trainer:TorchTrainer", "gcore_torch.config:TorchTrainerConfig"),
    "megatron": (
        "gcore_megatron.trainer:MegatronTrainer",
        "gcore_megatron.config:MegatronTrainerConfig",
    ),
    "deepspeed": (
        "gcore_deepspeed.trainer:DeepSpeedTrainer",
        "gcore_deepspeed.config:DeepSpeedTrainerConfig",
    ),
}


def waits_of(trainer: str, model: Path, work: Path) -> tuple[float, float]:
    """Returns what the ranks take together: as the trainer packs, and first come, first served.

    The costliest micro-batch of each place decides how long all ranks are in it. A micro-batch
    costs as many tokens as it has, padding included.
    """
    (work / "meet").mkdir(parents=True)
    given = [str(RANKS), str(model), str(work)]
    run_together([["-m", __name__, trainer, str(rank), *given] for rank in range(RANKS)])
    packed = [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return tuple(  # type: ignore[return-value]  # of two
        _waited([rank[way] for rank in packed]) for way in ("trainer", "first come")
    )


def _waited(ranks: Sequence[Sequence[int]]) -> float:
    # tokens of each rank's micro-batches, in the order in which they run
    table = np.zeros((len(ranks), max(map(len, ranks))))
    for row, tokens in zip(table, ranks, strict=True):
        row[: len(tokens)] = tokens
    return float(table.max(0).sum())


def run(trainer: str, rank: int, ranks: int, model: Path, work: Path) -> None:
    """Writes the tokens of this rank's micro-batches, packed in both ways."""
    factory, settings = map(import_attribute, TRAINERS[trainer])
    context = make_context(
        model, Reinforce(), rank=rank, ranks=ranks, rendezvous=str(work / "meet")
    )
    made = factory(settings(budget_tokens=BUDGET_TOKENS, packing="padded"), context)
    placed: list[Placed] = list(enumerate(long_tailed(rank)))
    (batches,) = made.pack([placed])
    samples = [
        Sample(index=i, ordinal=r.ordinal, prompt=r.columns["prompt_ids"], columns=r.columns)
        for i, r in placed
    ]
    first_come = micro_batches(samples, "padded", BUDGET_TOKENS, batches[0].ids.device)
    packed = {"trainer": _tokens(batches), "first come": _tokens(first_come)}
    (work / f"rank{rank}.json").write_text(json.dumps(packed))
    made.close()


def _tokens(batches: Any) -> list[int]:
    found: list[Batch] = list(batches)
    return [batch.ids.numel() for batch in found]


def long_tailed(rank: int) -> list[TrainRecord]:
    """The rank's records: their lengths have a long tail, and each rank has others."""
    draw = np.random.default_rng(rank)
    lengths = np.minimum(4 + 12 * np.exp(draw.standard_normal(12)), 100).astype(np.int64)
    return [
        TrainRecord(
            ordinal=number,
            sample=0,
            minibatch=0,
            columns={
                "prompt_ids": np.full(4, 5, np.int32),
                "action_ids": np.full(length, 6, np.int32),
                "logp": np.zeros(length, np.float32),
                "action_mask": np.ones(length, np.uint8),
                "temperature": np.array(1, np.float32),
            },
        )
        for number, length in enumerate(lengths)
    ]


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(Path, sys.argv[4:6]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
