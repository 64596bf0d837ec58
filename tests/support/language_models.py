"""Tiny random models with a tokenizer of single characters beside them, objectives to train them
with, and what a trainer should compute: transformers' model, one record at a time, in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_language.tiny import VOCABULARY, save_model, save_tokenizer
from torch import Tensor

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt
from gcore_core.contract.trainer import TrainRecord

__all__ = ["VOCABULARY", "save_model", "save_tokenizer"]


class Reinforce:
    """-advantage * logp, averaged over trained actions."""

    requires = frozenset()

    def loss(self, columns: Any, current: Any) -> Any:
        mask = columns["mask"].float()
        loss = -(columns["advantage"] * current["logp"] * mask).sum()
        return loss, mask.sum(), {}

    def weight(self, columns: Any) -> Any:
        return columns["mask"].float().sum()


class Clip:
    """PPO's clipped ratio, with a KL term to the reference when ``beta`` is set."""

    def __init__(self, beta: float = 0.0) -> None:
        self.beta = beta
        self.requires = frozenset({"old_logp", "ref_logp"} if beta else {"old_logp"})

    def loss(self, columns: Any, current: Any) -> Any:
        mask, advantage = columns["mask"].float(), columns["advantage"]
        ratio = (current["logp"] - columns["old_logp"]).exp()
        terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if self.beta:
            terms = terms + self.beta * (current["logp"] - columns["ref_logp"]) ** 2
        clipped = ((ratio - 1).abs() > 0.2).float() * mask
        return (
            (terms * mask).sum(),
            mask.sum(),
            {"clip_share": (clipped.sum().detach(), mask.sum())},
        )

    def weight(self, columns: Any) -> Any:
        return columns["mask"].float().sum()


def make_context(directory: Path, /, objective: Any = None, **changes: Any) -> WorkerContext:
    """Returns the context of a worker of the model in ``directory``, where its run's directory is,
    too.
    """
    facts = {
        "role": "policy",
        "steps": 10,
        "model": {"path": str(directory)},
        "directory": str(Path(directory) / "run"),
        "parts": {"objective": objective},
    }
    return WorkerContext(**(facts | changes))


def make_requests(
    groups: int = 3, samples: int = 4, *, first: int = 0, greedy: bool = False
) -> list[SampleRequest]:
    """Prompts of different lengths."""
    return [
        SampleRequest(
            ordinal=first + group,
            sample=sample,
            seed=1000 * (first + group) + sample,
            prompt=Prompt(row=group, text="12+34+56+78"[: 3 + 2 * (group % 4)] + "="),
            greedy=greedy,
        )
        for group in range(groups)
        for sample in range(samples)
    ]


def drain(generator: Any) -> list[Any]:
    """Steps until nothing is left; sorted by (ordinal, sample)."""
    finished = []
    while True:
        part = generator.step()
        finished += part
        if not part and not generator._rows.count and not generator._queue:
            return sorted(finished, key=lambda f: (f.request.ordinal, f.request.sample))


def make_records(
    groups: int = 4,
    samples: int = 4,
    *,
    minibatches: int = 1,
    seed: int = 0,
    least_actions: int = 1,
) -> list[TrainRecord]:
    """Random records with prompts and completions of different lengths; the last action of each is
    masked, unless it is the only one.
    """
    draw = np.random.default_rng(seed)
    records = []
    for group in range(groups):
        prompt = draw.integers(3, VOCABULARY, int(draw.integers(2, 9))).astype(np.int32)
        for sample in range(samples):
            actions = int(draw.integers(least_actions, 9))
            mask = np.ones(actions, np.uint8)
            mask[-1] = actions == 1
            columns = {
                "prompt_ids": prompt,
                "action_ids": draw.integers(2, VOCABULARY, actions).astype(np.int32),
                "logp": np.log(draw.uniform(0.01, 0.1, actions)).astype(np.float32),
                "action_mask": mask,
                "temperature": np.array(np.float32(0.7 if group == 1 else 1.0)),
            }
            records.append(
                TrainRecord(
                    ordinal=group, sample=sample, minibatch=group % minibatches, columns=columns
                )
            )
    return records


def make_advantages(records: Sequence[TrainRecord], seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(len(records))


def logp_of(model: Any, record: TrainRecord | Finished) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) float32[A] of a record's actions at its temperature."""
    prompt, actions = record.columns["prompt_ids"], record.columns["action_ids"].astype(np.int64)
    ids = torch.from_numpy(np.concatenate([prompt.astype(np.int64), actions]))[None]
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / float(record.columns["temperature"])
    logp = logits.log_softmax(-1)
    entropies = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, torch.from_numpy(actions)[:, None]).squeeze(1), entropies


def columns_of(records: Sequence[TrainRecord], advantages: np.ndarray) -> dict[str, Tensor]:
    """The columns of an objective that follow from the records alone."""
    lengths = [len(r.columns["action_ids"]) for r in records]
    return {
        "record": torch.from_numpy(np.repeat(np.arange(len(records)), lengths)),
        "mask": torch.from_numpy(
            np.concatenate([r.columns["action_mask"] for r in records]).astype(bool)
        ),
        "rollout_logp": torch.from_numpy(np.concatenate([r.columns["logp"] for r in records])),
        "advantage": torch.from_numpy(np.repeat(advantages.astype(np.float32), lengths)),
    }


def make_adamw(
    model: Any, settings: dict[str, Any], betas: tuple[float, float]
) -> torch.optim.AdamW:
    """torch's AdamW as trainers use it: matrices decay, vectors do not."""
    groups = [
        {
            "params": [p for p in model.parameters() if (p.dim() > 1) == matrices],
            "weight_decay": decay,
        }
        for matrices, decay in ((True, settings["weight_decay"]), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=settings["learning_rate"], betas=betas, eps=settings["eps"])
