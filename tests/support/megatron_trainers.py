"""What the trainer should compute, written down without any of its code: transformers' model, one
record at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gcore_core.contract.factories import import_attribute
from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import (
    columns_of,
    logp_of,
    make_adamw,
    make_advantages,
    make_records,
)

#: eps about as large as gradients are: else Adam makes whole steps of the rounding of gradients
#: that should be zero
SETTINGS = {
    "learning_rate": 3e-3,
    "eps": 1e-3,
    "clip_grad_norm": 0.3,
    "weight_decay": 0.1,
    "budget_tokens": 64,
}


def make_objective(name: str, settings: dict[str, Any]) -> Any:
    """An objective of gcore-algorithms by the name of its class."""
    import msgspec

    config = msgspec.convert(settings, import_attribute(f"gcore_algorithms.config:{name}Config"))
    return import_attribute(f"gcore_algorithms.objectives:{name}")(config)


def inputs(number: int) -> tuple[list[Any], np.ndarray]:
    """Records and advantages of a step."""
    records = make_records(samples=3, seed=number, minibatches=2)
    return records, make_advantages(records, seed=number)


def changed(model: Path, directory: Path, **changes: Any) -> Path:
    """A model directory with another config."""
    for file in model.iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


class Plain:
    """A policy, its reference and torch's AdamW; the loss of all records of a minibatch at once."""

    def __init__(
        self, model: Path, reference: Path, settings: dict[str, Any], objective: Any
    ) -> None:
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.reference = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
        self._settings, self._objective = settings, objective
        self._optimizer = make_adamw(self.policy, settings, betas=(0.9, 0.95))

    def kl(self, records: Sequence[TrainRecord]) -> list[float]:
        """Sum over trained actions of logp - ref_logp."""
        with torch.no_grad():
            pairs = [(logp_of(self.policy, r)[0], logp_of(self.reference, r)[0]) for r in records]
        masks = [torch.from_numpy(r.columns["action_mask"].astype(np.float32)) for r in records]
        return [
            float(((old - ref) * mask).sum()) for (old, ref), mask in zip(pairs, masks, strict=True)
        ]

    def train(
        self, records: Sequence[TrainRecord], advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """The last update's loss and the mean over updates of the gradient's norm."""
        with torch.no_grad():
            old = [logp_of(self.policy, record)[0] for record in records]
            reference = [logp_of(self.reference, record)[0] for record in records]
        losses, norms = [], []
        for _ in range(epochs):
            for minibatch in range(minibatches):
                chosen = [i for i, record in enumerate(records) if record.minibatch == minibatch]
                columns = columns_of([records[i] for i in chosen], advantages[chosen])
                columns["old_logp"] = torch.cat([old[i] for i in chosen])
                columns["ref_logp"] = torch.cat([reference[i] for i in chosen])
                parts = [logp_of(self.policy, records[i]) for i in chosen]
                current = {"logp": torch.cat([logp for logp, _ in parts])}
                if "entropy" in self._objective.requires:
                    current["entropy"] = torch.cat([entropy for _, entropy in parts])
                loss, weight, _ = self._objective.loss(columns, current)
                self._optimizer.zero_grad()
                (loss / weight).backward()
                norms.append(
                    float(
                        torch.nn.utils.clip_grad_norm_(
                            self.policy.parameters(), self._settings["clip_grad_norm"]
                        )
                    )
                )
                self._optimizer.step()
                losses.append(float(loss / weight))
        return {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms))}

    def weights(self) -> dict[str, np.ndarray]:
        """By Hugging Face name, tied tensors once."""
        return {name: p.detach().numpy().copy() for name, p in self.policy.named_parameters()}
