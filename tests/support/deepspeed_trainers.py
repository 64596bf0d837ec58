"""Tiny random models, records, and the same update in plain torch and transformers to compare
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore_core.contract.trainer import TrainRecord
from tests.support import language_models
from tests.support.language_models import Reinforce, columns_of, logp_of, make_adamw

#: eps as large as gradients are: else Adam makes whole steps of the rounding of gradients that
#: should be zero
SETTINGS = {
    "learning_rate": 2e-3,
    "eps": 1e-2,
    "weight_decay": 0.1,
    "clip_grad_norm": 0.3,
    "betas": [0.9, 0.99],
}
#: stage 3 shares matrices out, and vectors stay whole on every rank; by default all of models this
#: small would
SHARED_OUT = {"zero_optimization": {"stage3_param_persistence_threshold": 200}}


class Root(Reinforce):
    """A finite loss whose gradient is not."""

    def loss(self, columns: Any, current: Any) -> Any:
        zero = (current["logp"] - current["logp"].detach()).clamp(min=0)
        return zero.sqrt().sum(), columns["mask"].sum().float(), {}


def make_records(*, seed: int = 0) -> list[TrainRecord]:
    """Random records, of which each has a masked action and one that is not."""
    return language_models.make_records(seed=seed, least_actions=2)


class Plain:
    """A Hugging Face model in float32 with torch's AdamW: each record by itself, without
    padding.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.clip = settings["clip_grad_norm"]
        self.optimizer = make_adamw(self.model, settings, betas=tuple(settings["betas"]))

    def logp(self, record: TrainRecord) -> torch.Tensor:
        logp, _ = logp_of(self.model, record)
        return logp

    def backward(
        self, records: Sequence[TrainRecord], advantages: np.ndarray, objective: Any
    ) -> tuple[float, float]:
        """The normalised loss and the norm of its gradient, which it leaves in the parameters."""
        logp = [self.logp(record) for record in records]
        columns = columns_of(records, advantages)
        columns["old_logp"] = torch.cat(logp).detach()
        loss, weight, _ = objective.loss(columns, {"logp": torch.cat(logp)})
        self.optimizer.zero_grad()
        (loss / weight).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        return loss.item() / float(weight), float(norm)

    def update(
        self, records: Sequence[TrainRecord], advantages: np.ndarray, objective: Any
    ) -> tuple[float, float]:
        told = self.backward(records, advantages, objective)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return told

    def weights(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: p.grad.numpy().copy() for name, p in self.model.named_parameters()}

    def near(self, records: Sequence[TrainRecord], seed: int = 2) -> list[TrainRecord]:
        """The records with rollout log-probs not far from this model's: some ratios are clipped,
        others not.
        """
        draw = np.random.default_rng(seed)
        found = []
        with torch.no_grad():
            for record in records:
                logp = self.logp(record).numpy()
                logp = (logp + 0.3 * draw.standard_normal(len(logp))).astype(np.float32)
                found.append(replace(record, columns={**record.columns, "logp": logp}))
        return found


def train(
    trainer: Any, records: Sequence[TrainRecord], advantages: np.ndarray, step: int = 0
) -> dict[str, float]:
    """One update."""
    trainer.prepare(records, frozenset())
    return trainer.train(step, advantages, 1, 1)


def weights_of(trainer: Any) -> dict[str, np.ndarray]:
    return {
        spec.name: a.copy().view(np.float32).reshape(spec.shape)
        for spec, a in trainer.export_weights()
        if a.size
    }


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def logprobs_of(trainer: Any, count: int) -> list[np.ndarray]:
    """float32[A] of each of the ``count`` records last prepared, under the current weights."""
    prepared = trainer._prepared
    found: list[Any] = [None] * count
    for batch, logp in zip(
        prepared.all(), trainer._engine.logprobs(prepared.all(), "policy"), strict=True
    ):
        if batch is None:
            continue
        for place, index in enumerate(batch.index):
            found[index] = logp[batch.columns["record"] == place].numpy()
    return found
