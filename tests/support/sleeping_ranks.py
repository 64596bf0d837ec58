"""Ranks of a plugin's trainer, with sleep and without.

``found_by`` runs ``python -m tests.support.sleeping_ranks CASES RANK`` for each rank. Three steps
are made from one state, first without a sleep. The second time every step begins after one, a state
is saved beside a sleep, and the last step goes on from that state.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gcore_testing.runs import run_together

from gcore_core.contract.factories import import_attribute
from gcore_core.contract.weights_hash import WeightsHash
from tests.support.language_models import Clip, make_advantages, make_context, make_records
from tests.support.lockstep_ranks import TRAINERS

LIMIT_S = 300
SETTINGS = {
    "learning_rate": 3e-3,
    "clip_grad_norm": 0.3,
    "weight_decay": 0.1,
    "budget_tokens": 160,
}


def case_of(
    trainer: str,
    model: Path,
    *,
    slots: int = 1,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Returns what ``found_by`` takes.

    trainer: a plugin's, such as ``torch``.
    slots: that hold a replica of the model together.
    """
    return {
        "trainer": trainer,
        "model": str(model),
        "slots": slots,
        "engine": dict(engine or {}),
        "settings": SETTINGS | settings,
    }


def found_by(cases: Sequence[dict[str, Any]], work: Path, ranks: int = 2) -> list[tuple[Any, Any]]:
    """Returns of each case the metrics of the steps and the weights' hash, without sleep and with
    it.

    The same processes run one case after the other.
    """
    given = []
    for place, case in enumerate(cases):
        own = work / f"case{place}"
        (own / "meet").mkdir(parents=True)
        given.append({**case, "ranks": ranks, "work": str(own)})
    (work / "cases.json").write_text(json.dumps(given))
    programs = [["-m", __name__, str(work / "cases.json"), str(rank)] for rank in range(ranks)]
    run_together(programs, LIMIT_S)
    found = []
    for case in given:
        without, slept = json.loads((Path(case["work"]) / "numbers.json").read_text())
        found.append((without, slept))
    return found


def save_large(directory: Path) -> Path:
    """Saves a model whose tensors take many pages, 5 million numbers; returns its directory."""
    from gcore_language.tiny import save_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=4096,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def anonymous_bytes() -> int:
    """Returns this process's memory that is in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def run(case: dict[str, Any], rank: int) -> None:
    """Writes the metrics and the weights' hash of both ways; rank 0 only."""
    work = Path(case["work"])
    factory, settings = map(import_attribute, TRAINERS[case["trainer"]])
    context = make_context(
        Path(case["model"]),
        Clip(beta=0.1),
        rank=rank,
        ranks=case["ranks"],
        rendezvous=str(work / "meet"),
        directory=str(work),
        engine=case["engine"],
    )
    trainer = factory(msgspec.convert(case["settings"], settings), context)
    replica, replicas = rank // case["slots"], case["ranks"] // case["slots"]
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
    for given_case in json.loads(Path(sys.argv[1]).read_text()):
        run(given_case, int(sys.argv[2]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
