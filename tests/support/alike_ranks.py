"""Every kind of loss on any engine's trainer: two updates, and what its state goes on to.

``python -m tests.support.alike_ranks JOBS RANK``: one rank of each job of a JSON file, one after
the other. ``run`` does the same in this process. Tests of the engines' plugins compare what they
leave with what gcore-torch does on one rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_algorithms.advantages import Gae
from gcore_algorithms.config import GaeConfig
from gcore_algorithms.critic.config import ValueLossConfig
from gcore_algorithms.critic.loss import ValueLoss
from gcore_algorithms.offline.config import BradleyTerryConfig, DpoConfig, SftConfig
from gcore_algorithms.offline.objectives import BradleyTerry, Dpo, Sft
from gcore_algorithms.teacher.config import TOP_IDS, TOP_LOGP, JensenShannonConfig, ReverseKlConfig
from gcore_algorithms.teacher.objectives import JensenShannon, ReverseKl
from gcore_language.elastic import Layout
from gcore_language.tiny import VOCABULARY, save_model
from gcore_language.value_training import ValueTraining
from gcore_testing.runs import run_together

from gcore_core.contract.factories import import_attribute
from gcore_core.contract.trainer import TrainRecord
from gcore_core.contract.traits import traits_of
from tests.support.language_models import make_context, make_records
from tests.support.offline_ranks import pairs

STEPS = 2
#: float32 sums in another order, through two updates of AdamW.
TOLERANCE = 1e-5
#: eps as large as gradients are: else Adam makes whole steps of the rounding of gradients that
#: should be zero
SETTINGS = {
    "learning_rate": 2e-3,
    "eps": 1e-2,
    "weight_decay": 0.1,
    "clip_grad_norm": 0.3,
    "budget_tokens": 64,
    "value_head_std": 0.5,
}
TORCH = Layout(
    trainer="gcore_torch.trainer:make_trainer", config="gcore_torch.config:TorchTrainerConfig"
)
_VALUES = ("values", "next_values")
_PAIRS = {"sft", "dpo", "bradley-terry"}
#: Losses of models with a value head.
WITH_HEAD = ("critic", "bradley-terry")
#: Losses that compare distributions over the teacher's likeliest tokens.
OF_TOKENS = ("jsd",)
#: A vocabulary of which, over two tensor-parallel ranks, each has a part: 128 rows and 22.
WIDE = 150
#: Likeliest tokens of a teacher.
TOP_K = 6

OBJECTIVES: dict[str, Callable[[], Any]] = {
    "critic": lambda: ValueLoss(ValueLossConfig(clip=0.1)),
    "dpo": lambda: Dpo(DpoConfig()),
    "sft": lambda: Sft(SftConfig()),
    "bradley-terry": lambda: BradleyTerry(BradleyTerryConfig(margin=1.0, centring=0.01)),
    "reverse-kl": lambda: ReverseKl(ReverseKlConfig(reward_weight=0.5)),
    "jsd": lambda: JensenShannon(JensenShannonConfig(beta=0.3, reward_weight=0.5)),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one trainer trains.

    objective: a name of ``OBJECTIVES``.
    model: directory of the model.
    work: directory for state and numbers.
    resume: directory of another job, from whose state the last step is made; "": from its own.
    """

    layout: Layout
    objective: str
    model: str
    work: str
    resume: str = ""


def save_models(root: Path) -> dict[str, str]:
    """Writes models of the family qwen2 under ``root``; returns the directory of each objective.

    The vocabulary is ``WIDE`` where tokens are compared.
    """
    for name, extra in (("narrow", 0), ("wide", WIDE - VOCABULARY)):
        save_model(root / name, "qwen2", extra=extra)
    return {name: str(root / ("wide" if name in OF_TOKENS else "narrow")) for name in OBJECTIVES}


def run_jobs(jobs: Sequence[Job], room: Path) -> None:
    """Runs jobs of the same number of ranks, each rank in a process of its own."""
    room.mkdir(parents=True)
    file = room / "jobs.json"
    file.write_text(json.dumps([asdict(job) for job in jobs]))
    (ranks,) = {job.layout.ranks for job in jobs}
    run_together([["-m", __name__, str(file), str(rank)] for rank in range(ranks)])


def run(job: Job, rank: int = 0) -> None:
    """Trains, saves, and makes one step more from a state; rank 0 writes numbers and weights."""
    work, layout = Path(job.work), job.layout
    (work / "meet").mkdir(parents=True, exist_ok=True)
    settings = import_attribute(layout.config)(**{**SETTINGS, **layout.settings})
    trainer = import_attribute(layout.trainer)(settings, _context(job, rank))
    slots = traits_of(settings).replica_slots
    share = rank // slots, layout.ranks // slots
    before = _weights(trainer)
    metrics = [_train(trainer, job.objective, step, *share) for step in range(STEPS)]
    weights = _weights(trainer)
    trainer.save(work / "state")
    trainer.load(Path(job.resume or work) / "state")
    metrics.append(_train(trainer, job.objective, trainer.version, *share))
    trainer.save_pretrained(work / "pretrained")
    trainer.close()
    if rank == 0:
        moved = max(float(np.abs(weights[name] - before[name]).max()) for name in weights)
        assert moved > 100 * TOLERANCE, "the updates are too small to compare anything"
        (work / "metrics.json").write_text(json.dumps(metrics))
        np.savez(work / "weights.npz", **weights)


def _weights(trainer: Any) -> dict[str, np.ndarray]:
    """Returns the exported weights, float32; those of rank 0 alone have anything in them."""
    return {
        spec.name: array.copy().view(np.float32).reshape(spec.shape)
        for spec, array in trainer.export_weights()
        if array.size
    }


def _context(job: Job, rank: int) -> Any:
    return make_context(
        Path(job.model),
        role="critic" if job.objective == "critic" else "policy",
        rank=rank,
        ranks=job.layout.ranks,
        rendezvous=str(Path(job.work) / "meet"),
        directory=job.work,
        engine=job.layout.engine,
        parts={"objective": OBJECTIVES[job.objective](), **_advantage(job.objective)},
        columns=_VALUES if job.objective == "critic" else (),
        given=(*_VALUES, "label", "teacher_logp", TOP_IDS, TOP_LOGP),
    )


def _advantage(objective: str) -> dict[str, Any]:
    """Returns the part that a critic's returns come from."""
    return {"advantage": Gae(GaeConfig(lam=0.9, gamma=0.99))} if objective == "critic" else {}


def _records(objective: str, step: int) -> list[TrainRecord]:
    """Returns the records of a step, all of one minibatch."""
    if objective in _PAIRS:
        return [replace(record, minibatch=0) for record in pairs(step)]
    draw = np.random.default_rng(100 + step)
    made = make_records(seed=step, least_actions=2)
    if objective in OF_TOKENS:
        made = [_with_likeliest(record, draw) for record in made]
    return [_taught(record, draw) for record in made]


def _taught(record: TrainRecord, draw: np.random.Generator) -> TrainRecord:
    """Adds a teacher's log-probs; every second record was cut."""
    logp = record.columns["logp"]
    teacher = np.minimum(logp + draw.normal(size=logp.shape), 0).astype(np.float32)
    columns = {**record.columns, "teacher_logp": teacher}
    return replace(record, columns=columns, truncated=record.sample % 2 == 1)


def _with_likeliest(record: TrainRecord, draw: np.random.Generator) -> TrainRecord:
    """Adds a teacher's likeliest tokens, and takes the actions from the whole vocabulary."""
    actions = len(record.columns["action_ids"])
    logits = 2 * draw.normal(size=(actions, WIDE))
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-logp, 1)[:, :TOP_K].astype(np.int32)
    own = {
        "action_ids": draw.integers(0, WIDE, actions).astype(np.int32),
        TOP_IDS: ids,
        TOP_LOGP: np.take_along_axis(logp, ids, 1).astype(np.float32),
    }
    return replace(record, columns={**record.columns, **own})


def _train(trainer: Any, objective: str, step: int, replica: int, replicas: int) -> Any:
    """One step, of which the first replica has most prompts' records, the others one's each."""
    records = _records(objective, step)
    numbers = np.random.default_rng(step).standard_normal(len(records))
    last = max(record.ordinal for record in records)
    mine = [
        i
        for i, record in enumerate(records)
        if max(0, record.ordinal - last + replicas - 1) == replica
    ]
    own = [records[i] for i in mine]
    if objective == "critic":
        assert isinstance(trainer, ValueTraining)
        own = [
            replace(record, columns={**record.columns, **given})
            for record, given in zip(own, trainer.annotate(own), strict=True)
        ]
    trainer.prepare(own, frozenset())
    return trainer.train(step, numbers[mine], 1, 1)


_COMPARED = {
    "explained_variance",
    "grad_norm",
    "loss",
    "policy_tail",
    "teacher_jsd",
    "value_loss",
}


def metrics_of(work: Path) -> list[dict[str, float]]:
    """Returns the metrics of each step; the last one's began from ``Job.resume``."""
    metrics: list[dict[str, float]] = json.loads((work / "metrics.json").read_text())
    return metrics


def assert_alike(work: Path, expected: Path) -> None:
    """Asserts that a job's losses, gradient norms and weights are those of another one."""
    for step, (own, other) in enumerate(zip(metrics_of(work), metrics_of(expected), strict=True)):
        for name in _COMPARED & other.keys():
            np.testing.assert_allclose(
                own[name], other[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{step} {name}"
            )
    weights, theirs = (dict(np.load(path / "weights.npz")) for path in (work, expected))
    assert weights.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(weights[name], array, rtol=0, atol=TOLERANCE, err_msg=name)


def _main(file: Path, rank: int) -> None:
    torch.set_num_threads(1)
    for plain in json.loads(file.read_text()):
        run(Job(**{**plain, "layout": Layout(**plain["layout"])}), rank)
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
