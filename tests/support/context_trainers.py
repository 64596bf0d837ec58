"""One rank of gcore-torch's trainer whose slots share micro-batches, and its numbers as JSON.

``python -m tests.support.context_trainers RANK RANKS MODEL WORK CASE ...``,
by plugins/gcore-torch/tests/test_context.py. WORK/alone has the numbers and the state of one rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gcore_algorithms.advantages import Gae
from gcore_algorithms.config import GaeConfig
from gcore_language.context.settings import ContextSettings
from gcore_language.lora_settings import LoraSettings
from gcore_language.shared_settings import ValueHeadSettings
from gcore_language.weights import from_bytes, full
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.offload_settings import OffloadSettings
from gcore_torch.sharding_settings import ShardingSettings
from gcore_torch.trainer import TorchTrainer, make_trainer

from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import (
    Clip,
    Reinforce,
    make_advantages,
    make_context,
    make_records,
)
from tests.support.value_ranks import Squares

#: Settings by what is trained. "alone" is a policy in float32.
LIKES: dict[str, dict[str, Any]] = {
    "alone": {},
    "adapters": {"lora": LoraSettings(rank=3, alpha=6.0)},
    "value head": {
        "value_head": ValueHeadSettings(coefficient=0.3, clip=0.05, speed=2.0),
        "value_head_std": 0.5,
    },
    "values": {"value_head_std": 0.5},
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
}
#: What is trained with a loss that has no edge, as PPO's clip has one.
_SMOOTH = ("float32", "bfloat16")

#: Settings by name; of four ranks, so that some have two data-parallel groups.
CASES: dict[str, dict[str, Any]] = {
    "ring 2, data 2": {"context": {"ring": 2}},
    "ring 2, ulysses 2, none whole": {"context": {"ring": 2, "ulysses": 2, "whole": "never"}},
}
#: Others, which take longer together than a test should.
MORE_CASES: dict[str, dict[str, Any]] = {
    "ulysses 2, data 2": {"context": {"ulysses": 2}},
    "ring 2, ulysses 2": {"context": {"ring": 2, "ulysses": 2}},
    "ring 4, checkpointing": {"context": {"ring": 4}, "gradient_checkpointing": True},
}
#: With replicas of shards. Each in processes of its own: torch keeps plans of groups of a mesh.
REPLICAS: dict[str, dict[str, Any]] = {
    "ring 2, replicas 2": {"context": {"ring": 2}, "sharding": ShardingSettings(replicas=2)},
    "ring 4 over two replicas": {
        "context": {"ring": 4, "whole": "never"},
        "sharding": ShardingSettings(replicas=2),
    },
    "ulysses 2, four replicas": {
        "context": {"ulysses": 2},
        "sharding": ShardingSettings(replicas=4),
    },
}
#: Other things that are trained, by two ranks.
OTHERS: dict[str, dict[str, Any]] = {
    "adapters, ring 2": {"like": "adapters", "context": {"ring": 2}},
    "value head, ring 2": {"like": "value head", "context": {"ring": 2}},
    "values, ulysses 2": {"like": "values", "context": {"ulysses": 2}},
    "ring 2, all on the host": {
        "like": "alone",
        "context": {"ring": 2},
        "offload": OffloadSettings(state=True, activations=True),
        "gradient_checkpointing": True,
    },
}
#: In bfloat16, of two ranks.
ROUGH: dict[str, dict[str, Any]] = {
    "bfloat16, ring 2": {"like": "bfloat16", "context": {"ring": 2, "whole": "never"}},
    "bfloat16, ulysses 2": {"like": "bfloat16", "context": {"ulysses": 2}},
}
_STEPS = 2


def run(
    rank: int,
    ranks: int,
    model: Path,
    work: Path,
    *,
    like: str = "alone",
    resume: Path | None = None,
    context: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Returns gradients, metrics and weights of two steps, and of one from the state ``resume``.

    Writes state/ under ``work``.

    like: a key of ``LIKES``.
    context, settings: of the trainer.
    """
    (work / "meet").mkdir(parents=True, exist_ok=True)
    is_values = like == "values"
    policy = Reinforce() if like in _SMOOTH else Clip(beta=0.1)
    objective = Squares() if is_values else policy
    facts = make_context(model, objective, rank=rank, ranks=ranks, rendezvous=str(work / "meet"))
    if like == "value head":
        facts.parts["advantage"] = Gae(GaeConfig(lam=0.9))
    config = TorchTrainerConfig(
        learning_rate=3e-3,
        eps=1e-3,  # as large as gradients are: else Adam makes whole steps of their rounding
        clip_grad_norm=0.3,
        budget_tokens=24,
        context=ContextSettings(**(context or {})),
        **LIKES[like] | settings,
    )
    trainer = make_trainer(config, facts)
    degree = config.traits().replica_slots
    has_reference = not is_values and like not in _SMOOTH
    scalars = frozenset({"kl_k1"}) if has_reference else frozenset()
    place = rank // degree, ranks // degree, scalars
    gradients = _watch(trainer)
    metrics = [_step(trainer, step, *place) for step in range(_STEPS)]
    numbers = {"metrics": metrics, "weights": _weights(trainer), "gradients": list(gradients)}
    trainer.save(work / "state")
    if resume is not None:
        trainer.load(resume)
        numbers["resumed"] = [_step(trainer, _STEPS, *place)]
        numbers["after"] = _weights(trainer)
    trainer.close()
    return numbers


def _watch(trainer: TorchTrainer) -> list[dict[str, list[float]]]:
    """Returns a list that gets the whole gradient of each update."""
    engine = trainer._engine
    update = engine.update
    gradients: list[dict[str, list[float]]] = []

    def watched(rate: float, clip: float) -> float:
        scale = engine._gradients.scale
        parts = engine.gradient().items()
        gradients.append({n: (full(g) * scale).flatten().tolist() for n, g in parts})
        return update(rate, clip)

    engine.update = watched  # type: ignore[method-assign]
    return gradients


def records_of(step: int) -> list[TrainRecord]:
    """Returns short records and two that are longer than a slot's budget."""
    records = make_records(seed=step, minibatches=2)
    draw = np.random.default_rng(100 + step)
    for place, (prompt, actions) in ((0, (50, 20)), (3, (7, 90))):
        columns = {
            **records[place].columns,
            "prompt_ids": draw.integers(3, 20, prompt).astype(np.int32),
            "action_ids": draw.integers(3, 20, actions).astype(np.int32),
            "logp": np.log(draw.uniform(0.01, 0.1, actions)).astype(np.float32),
            "action_mask": np.ones(actions, np.uint8),
        }
        old = records[place]
        records[place] = TrainRecord(
            ordinal=old.ordinal, sample=old.sample, minibatch=old.minibatch, columns=columns
        )
    return records


def _step(
    trainer: TorchTrainer, step: int, group: int, groups: int, scalars: frozenset[str]
) -> dict[str, float]:
    records = records_of(step)
    advantages = make_advantages(records, seed=step)
    # uneven: the last group has a quarter of one minibatch and nothing of the other
    last = np.array([i % 4 == 0 and record.minibatch == 0 for i, record in enumerate(records)])
    mine = (np.where(last, groups - 1, 0) == group).nonzero()[0]
    trainer.prepare([records[i] for i in mine], scalars)
    return trainer.train(step, advantages[mine], 2, 2)


def _weights(trainer: TorchTrainer) -> dict[str, list[float]]:
    """Returns the weights by name, and the adapters' by theirs; empty beside rank 0."""
    return {
        spec.name: from_bytes(spec, content).flatten().tolist() if content.size else []
        for exported in (trainer.export_weights(), trainer.export_adapter())
        for spec, content in exported
    }


def main(rank: int, ranks: int, model: Path, work: Path, names: list[str]) -> None:
    for name in names:
        settings = {**CASES, **MORE_CASES, **REPLICAS, **OTHERS, **ROUGH}[name]
        resume = work / settings.get("like", "alone") / "state"
        numbers = run(rank, ranks, model, work / name, resume=resume, **settings)
        if rank == 0:
            (work / name / "numbers.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    sys.stdout.flush()
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
