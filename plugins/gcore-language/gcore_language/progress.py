"""Adds up what a training step reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.algorithms import LOG_RATIO_LIMIT
from gcore_language.packing import Batch
from gcore_language.ranks import Sums, Terms

#: ``logprob_gap_share`` is the share of actions whose gap is larger: rounding in float32 leaves
#: few.
GAP = 1e-4


@dataclass(kw_only=True)
class Progress:
    """Numbers of one step on one rank, before they are added up over ranks.

    step: number of the step.
    terms: metric -> (value, weight) of each micro-batch.
    gap: largest difference between rollout's and trainer's log-probs, in nats; infinite
        where one is no number.
    losses: normalised loss of each update.
    norms: gradient norm of each update.
    rates: learning rate of each update.
    """

    step: int
    terms: Terms = field(default_factory=dict)
    gap: float = 0.0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, name: str, value: float, weight: float) -> None:
        """Adds a value and its weight to a metric."""
        self.terms.setdefault(name, []).append((value, weight))

    def compare(self, logp: Tensor, batch: Batch) -> None:
        """Compares the rollout's log-probs with the trainer's, where both come from the same
        weights.

        logp: float32[A], the trainer's.
        """
        same = batch.columns["mask"] * batch.columns["fresh"]
        gap = (logp - batch.columns["rollout_logp"]).abs().masked_fill(same == 0, 0.0)
        # Python takes NaN for no larger than any number, and so for no gap.
        gap = gap.nan_to_num(nan=math.inf, posinf=math.inf)
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
        """Adds the metrics of one micro-batch.

        ``kl`` is the k3 estimate of KL(rollout || current policy), unless the objective gives one.

        logp, entropies: float32[A], of the batch's actions.
        metrics: the objective's, name -> (value, weight).
        """
        mask = batch.columns["mask"]
        count = float(mask.sum())
        log_ratio = (logp - batch.columns["rollout_logp"]) * mask
        log_ratio = log_ratio.clamp(max=LOG_RATIO_LIMIT)  # else exp() overflows
        self.add("entropy", float((entropies * mask).sum()), count)
        if "kl" not in metrics:
            self.add("kl", float((torch.exp(log_ratio) - 1 - log_ratio).sum()), count)
        self.count(batch, metrics)

    def count(self, batch: Batch, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Adds the trained actions of one micro-batch, and the objective's metrics."""
        for name, (value, weight) in metrics.items():
            self.add(name, float(value), float(weight))
        self.add("actions", float(batch.columns["mask"].sum()), 0.0)

    def updated(self, loss: float, norm: float, rate: float) -> None:
        """Notes loss, gradient norm and learning rate of an update."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.rates.append(rate)

    def metrics(self, sums: Sums, gap: float) -> dict[str, float]:
        """Returns the step's metrics; a mean where weights were added, else a sum.

        sums, gap: those of all ranks.
        """
        means = {
            name: value / weight if weight else value for name, (value, weight) in sums.items()
        }
        defaults = dict.fromkeys(
            ("entropy", "kl", "clip_share", "logprob_gap_mean", "logprob_gap_share"), 0.0
        )
        return {
            **defaults,
            **means,
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
            "learning_rate": self.rates[-1] if self.rates else 0.0,
            "logprob_gap_max": gap,
            "updates": float(len(self.rates)),
        }
