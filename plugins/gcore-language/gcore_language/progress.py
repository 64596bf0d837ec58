"""What a training step reports."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.algorithms import LOG_RATIO_LIMIT
from gcore_language.packing import Batch
from gcore_language.ranks import Sums

#: ``logprob_gap_share`` is the share of actions whose gap is larger: rounding in float32 leaves
#: few.
GAP = 1e-4


@dataclass(kw_only=True)
class Progress:
    """Numbers of one step, before they are added up over ranks."""

    step: int
    sums: Sums = field(default_factory=dict)
    gap: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, name: str, value: float, weight: float) -> None:
        before = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (before[0] + value, before[1] + weight)

    def compare(self, logp: Tensor, batch: Batch) -> None:
        """Rollout against trainer log-probs, where both are under the same weights."""
        same = batch.columns["mask"] * batch.columns["fresh"]
        gap = (logp - batch.columns["rollout_logp"]).abs() * same
        self.gap = max(self.gap, float(gap.max()))
        count = float(same.sum())
        self.add("logprob_gap_mean", float(gap.sum()), count)
        self.add("logprob_gap_share", float((gap > GAP).sum()), count)

    def observe(
        self,
        logp: Tensor,
        entropies: Tensor,
        batch: Batch,
        metrics: dict[str, tuple[Tensor, Tensor]],
    ) -> None:
        mask = batch.columns["mask"]
        count = float(mask.sum())
        log_ratio = (logp - batch.columns["rollout_logp"]) * mask
        log_ratio = log_ratio.clamp(max=LOG_RATIO_LIMIT)  # else exp() overflows
        self.add("entropy", float((entropies * mask).sum()), count)
        if "kl" not in metrics:
            self.add("kl", float((torch.exp(log_ratio) - 1 - log_ratio).sum()), count)
        for name, (value, weight) in metrics.items():
            self.add(name, float(value), float(weight))
        self.add("actions", count, 0.0)

    def updated(self, loss: float, norm: float, rate: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self.rates.append(rate)

    def metrics(self, sums: Sums, gap: float) -> dict[str, float]:
        found = {
            name: value / weight if weight else value for name, (value, weight) in sums.items()
        }
        defaults = dict.fromkeys(
            ("entropy", "kl", "clip_share", "logprob_gap_mean", "logprob_gap_share"), 0.0
        )
        return {
            **defaults,
            **found,
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
            "learning_rate": self.rates[-1] if self.rates else 0.0,
            "logprob_gap_max": gap,
            "updates": float(len(self.rates)),
        }
