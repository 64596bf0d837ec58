"""One rank of gcore-torch's trainer in several layouts; it writes its numbers as JSON.

``python -m tests.support.layout_ranks RANK RANKS MODELS WORK RESUME CASE ...``, by test_layouts.py.
Each case takes two steps and saves a state, then one step more from the state below RESUME of its
``like``, which one rank saved.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_algorithms.advantages import Gae
from gcore_algorithms.config import GaeConfig
from gcore_language import policy
from gcore_language.lora_settings import LoraSettings
from gcore_language.shared_settings import ValueHeadSettings
from gcore_language.tiny import VOCABULARY
from gcore_language.weights import from_bytes, full
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.offload_settings import OffloadSettings
from gcore_torch.sharding_settings import ShardingSettings
from gcore_torch.trainer import TorchTrainer, make_trainer

from gcore_core.contract.columns import ROUTING
from tests.support.expert_ranks import routed
from tests.support.language_models import Clip, make_advantages, make_context, make_records
from tests.support.value_ranks import Squares

_CHUNK_LOGITS = policy._CHUNK_LOGITS

#: What a case is compared with: one rank that holds the model as it is.
ALONE = ShardingSettings()


@dataclass(frozen=True, kw_only=True)
class Like:
    """What is trained, in whatever layout.

    model: a family of ``gcore_language.tiny``.
    values: whether it is a model of values, without a head of words.
    shared_values: whether the policy has a value head on its trunk.
    routed: whether the records of steps 0 and 2 say their experts: in step 0 some that no router
        would choose, in step 2 the first two, so that others get no token.
    settings: of the trainer.
    tolerance: how far numbers may be apart, as a share of a tensor's largest number, or of 1. In
        float32 that is sums in another order; products in bfloat16 have two digits.
    """

    model: str = "qwen2"
    values: bool = False
    shared_values: bool = False
    routed: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout in which something is trained.

    like: a key of ``LIKES``.
    ranks: how many ranks there are.
    sharding: of the trainer's settings.
    sleeps: whether the trainer sleeps before each step.
    settings: more of the trainer's settings.
    chunk: most logits that are held at once; 0: as many as ever.
    exactly: another case whose numbers have the same bits; "": none.
    """

    like: str
    ranks: int
    sharding: ShardingSettings = ALONE
    sleeps: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    chunk: int = 0
    exactly: str = ""


LIKES = {
    "flat": Like(),
    "padded": Like(model="qwen3", settings={"packing": "padded"}),
    "adapters": Like(settings={"lora": LoraSettings(rank=3, alpha=6.0)}),
    "values": Like(values=True, settings={"value_head_std": 0.5}),
    "shared values": Like(
        model="qwen3",
        shared_values=True,
        settings={
            "value_head": ValueHeadSettings(coefficient=0.3, clip=0.05, speed=2.0),
            "value_head_std": 0.5,
            "packing": "padded",
        },
    ),
    "llama": Like(model="llama"),
    "llama adapters": Like(model="llama", settings={"lora": LoraSettings(rank=3, alpha=6.0)}),
    "shared": Like(model="qwen3", settings={"packing": "shared_prompt"}),
    "bfloat16": Like(settings={"dtype": "bfloat16", "packing": "padded"}, tolerance=2e-2),
    "experts": Like(model="qwen3_moe", settings={"router_aux_loss": 0.1}),
    "replayed": Like(model="mixtral", routed=True, settings={"router_aux_loss": 0.1}),
    "bfloat16 replayed": Like(model="qwen3_moe", routed=True, settings={"dtype": "bfloat16"}),
    "expert values": Like(model="qwen3_moe", values=True, settings={"value_head_std": 0.5}),
}
_TWO = ShardingSettings(replicas=2)
_SPREAD = ShardingSettings(experts=2)
_STATE = {"offload": OffloadSettings(state=True)}
_BOTH = {
    "offload": OffloadSettings(state=True, activations=True),
    "gradient_checkpointing": True,
}
CASES = {
    "alone": Case(like="flat", ranks=1),
    "alone, state on the host": Case(like="flat", ranks=1, settings=_STATE, exactly="alone"),
    "padded alone": Case(like="padded", ranks=1),
    "padded alone, all on the host": Case(
        like="padded", ranks=1, settings=_BOTH, exactly="padded alone"
    ),
    "adapters alone": Case(like="adapters", ranks=1),
    "adapters alone, all on the host": Case(
        like="adapters", ranks=1, settings=_BOTH, exactly="adapters alone"
    ),
    "two ranks, one replica": Case(like="flat", ranks=2),
    "two ranks, all on the host": Case(
        like="flat", ranks=2, settings=_BOTH, exactly="two ranks, one replica"
    ),
    "bfloat16": Case(like="bfloat16", ranks=2, sharding=_TWO),
    "bfloat16, all on the host": Case(
        like="bfloat16", ranks=2, sharding=_TWO, settings=_BOTH, exactly="bfloat16"
    ),
    "tensor": Case(like="padded", ranks=2, sharding=ShardingSettings(tensor=2)),
    "tensor, shared prompts": Case(like="shared", ranks=2, sharding=ShardingSettings(tensor=2)),
    "tensor, values": Case(like="values", ranks=2, sharding=ShardingSettings(tensor=2)),
    "tensor, llama checkpointed": Case(
        like="llama",
        ranks=2,
        sharding=ShardingSettings(tensor=2),
        settings={"gradient_checkpointing": True},
    ),
    "llama of two ranks": Case(like="llama", ranks=2),
    "llama of two ranks, head in chunks": Case(
        like="llama", ranks=2, settings={"gradient_checkpointing": True}, chunk=7 * VOCABULARY
    ),
    "llama adapters of two ranks": Case(like="llama adapters", ranks=2),
    "values of two ranks": Case(like="values", ranks=2),
    "values of two ranks, state on the host": Case(
        like="values", ranks=2, settings=_STATE, exactly="values of two ranks"
    ),
    "shared values alone, all on the host": Case(like="shared values", ranks=1, settings=_BOTH),
    "shared values of two ranks": Case(like="shared values", ranks=2),
    "shared values of two ranks, all on the host": Case(
        like="shared values", ranks=2, settings=_BOTH, exactly="shared values of two ranks"
    ),
    "shared values, tensor": Case(
        like="shared values", ranks=2, sharding=ShardingSettings(tensor=2)
    ),
    "two ranks, two replicas": Case(like="padded", ranks=2, sharding=_TWO),
    "flat": Case(like="flat", ranks=4, sharding=_TWO),
    "padded, asleep in between": Case(like="padded", ranks=4, sharding=_TWO, sleeps=True),
    "adapters": Case(like="adapters", ranks=4, sharding=_TWO),
    "values": Case(like="values", ranks=4, sharding=_TWO),
    "llama, replicas, all on the host": Case(
        like="llama", ranks=4, sharding=_TWO, settings=_BOTH, chunk=7 * VOCABULARY
    ),
    "shared values, replicas": Case(like="shared values", ranks=4, sharding=_TWO, sleeps=True),
    "shared values, replicas, state on the host": Case(
        like="shared values",
        ranks=4,
        sharding=_TWO,
        settings=_STATE,
        exactly="shared values, replicas",
    ),
    "shared values, data and tensor": Case(
        like="shared values", ranks=4, sharding=ShardingSettings(tensor=2), sleeps=True
    ),
    "experts": Case(like="experts", ranks=4, sharding=_TWO),
    "experts, all on the host": Case(
        like="experts", ranks=4, sharding=_TWO, settings=_BOTH, exactly="experts"
    ),
    "data and tensor": Case(
        like="padded", ranks=4, sharding=ShardingSettings(tensor=2), sleeps=True
    ),
    "data and tensor, auto": Case(like="flat", ranks=4, sharding=ShardingSettings(tensor=2)),
    "four replicas": Case(like="flat", ranks=4, sharding=ShardingSettings(replicas=4)),
    "experts over two": Case(like="experts", ranks=2, sharding=_SPREAD),
    "experts over two, all on the host": Case(
        like="experts", ranks=2, sharding=_SPREAD, settings=_BOTH, exactly="experts over two"
    ),
    "replayed over two": Case(
        like="replayed",
        ranks=2,
        sharding=_SPREAD,
        sleeps=True,
        settings={"gradient_checkpointing": True},
    ),
    "values of experts over two": Case(like="expert values", ranks=2, sharding=_SPREAD),
    "experts over two of four": Case(like="experts", ranks=4, sharding=_SPREAD),
    "replayed over four": Case(
        like="replayed",
        ranks=4,
        sharding=ShardingSettings(experts=4),
        settings={"packing": "padded"},
    ),
}

#: Cases that are compared with each other alone: one rank's batches are others, and in bfloat16 a
#: ratio beyond the clip on one side only changes a gradient by a tenth.
ROUNDED = {
    "bfloat16 replayed of two ranks": Case(like="bfloat16 replayed", ranks=2),
    "bfloat16 replayed over two": Case(like="bfloat16 replayed", ranks=2, sharding=_SPREAD),
}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process among the ranks of a trainer."""

    rank: int = 0
    count: int = 1


def alone(like: str, models: Path, work: Path, resume: Path | None = None) -> dict[str, Any]:
    """Returns what one rank comes to; see ``run``."""
    return run(Case(like=like, ranks=1), Rank(), models, work, resume)


def run(
    case: Case, own: Rank, models: Path, work: Path, resume: Path | None = None
) -> dict[str, Any]:
    """Returns metrics, gradients and weights; saves ``work``/state after two of three steps.

    resume: a state from which the third step is made; None: the own one.
    """
    (work / "meet").mkdir(parents=True, exist_ok=True)
    policy._CHUNK_LOGITS = case.chunk or _CHUNK_LOGITS
    trainer = _open(case, own, models, work)
    gradients = _watch(trainer)
    metrics = [_step(trainer, step, case, own) for step in (0, 1)]
    trainer.begin_save(work / "state")
    trainer.finish_save()
    weights = _weights(trainer)
    trainer.load(resume or work / "state")
    metrics.append(_step(trainer, 2, case, own))
    after = _weights(trainer)
    trainer.save_pretrained(work / "pretrained")
    trainer.close()
    for step in metrics:
        step.pop("busy_s", None)
    return {"metrics": metrics, "gradients": gradients, "weights": weights, "after": after}


def _open(case: Case, own: Rank, models: Path, work: Path) -> TorchTrainer:
    like = LIKES[case.like]
    # eps as large as gradients are: else Adam makes a whole step of the rounding of a gradient that
    # should be zero
    settings: dict[str, Any] = {
        "learning_rate": 3e-3,
        "eps": 1e-3,
        "clip_grad_norm": 0.3,
        "weight_decay": 0.1,
        "budget_tokens": 64,
        "sharding": case.sharding,
    }
    context = make_context(
        models / like.model,
        Squares() if like.values else Clip(beta=0.1),
        rank=own.rank,
        ranks=own.count,
        rendezvous=str(work / "meet"),
        directory=str(work),
    )
    if like.shared_values:
        context.parts["advantage"] = Gae(GaeConfig(lam=0.9))
    return make_trainer(TorchTrainerConfig(**settings | like.settings | case.settings), context)


def _watch(trainer: TorchTrainer) -> list[dict[str, list[float]]]:
    """Returns a list to which every update adds its gradient."""
    engine = trainer._engine
    found: list[dict[str, list[float]]] = []
    update = engine.update

    def watched(rate: float, clip: float) -> float:
        scale = engine._gradients.scale
        gradient = {name: full(g) * scale for name, g in engine.gradient().items()}
        found.append({name: tensor.flatten().tolist() for name, tensor in gradient.items()})
        return update(rate, clip)

    engine.update = watched  # type: ignore[method-assign]
    return found


def _step(trainer: TorchTrainer, step: int, case: Case, own: Rank) -> dict[str, float]:
    if case.sleeps:
        trainer.sleep()
        trainer.wake()
    records = make_records(seed=step, minibatches=2)
    if LIKES[case.like].routed:
        records = [routed(record, step) for record in records]
        if step == 2:
            for record in records:
                record.columns[ROUTING][:] = (0, 1)
    advantages = make_advantages(records, seed=step)
    # uneven: the last of those that get other records has a few of one minibatch
    dealt = own.count // case.sharding.tensor
    place = own.rank // case.sharding.tensor
    last = np.array([i % 4 == 0 and record.minibatch == 0 for i, record in enumerate(records)])
    others = np.arange(len(records)) % max(1, dealt - 1)
    mine = (np.where(last, dealt - 1, others) == place).nonzero()[0]
    scalars = frozenset() if LIKES[case.like].values else frozenset({"kl_k1"})
    trainer.prepare([records[i] for i in mine], scalars)
    return trainer.train(step, advantages[mine], 2, 1)


def _weights(trainer: TorchTrainer) -> dict[str, list[float]]:
    """Returns the weights by name, and the adapters' as "adapter <name>"; empty beside rank 0."""
    parts = [("", trainer.export_weights()), ("adapter ", trainer.export_adapter())]
    return {
        mark + spec.name: from_bytes(spec, content).flatten().tolist() if content.size else []
        for mark, exported in parts
        for spec, content in exported
    }


def main(own: Rank, models: Path, work: Path, resume: Path, names: Sequence[str]) -> None:
    """Writes numbers.json of each case below ``work``/<name>; rank 0 only."""
    torch.set_num_threads(1)
    for name in names:
        case = (CASES | ROUNDED)[name]
        found = run(case, own, models, work / name, resume / case.like / "state")
        if own.rank == 0:
            (work / name / "numbers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    place = Rank(rank=int(sys.argv[1]), count=int(sys.argv[2]))
    of_models, of_work, of_states = map(Path, sys.argv[3:6])
    main(place, of_models, of_work, of_states, sys.argv[6:])
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
