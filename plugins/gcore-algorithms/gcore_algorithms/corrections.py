"""Importance weights for actions that another engine sampled.

A generator computes the log-probs of the same weights a little differently from the trainer
(kernels, precision, routing), so its samples are slightly off policy before the first update.
Weights exp(old_logp - rollout_logp) correct that; unbounded they have a large variance, so they are
truncated or masked. Sources: Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025), truncated; Ling Team, "Every Step Evolves", arXiv:2510.18855, masked
on both sides per action (IcePop).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gcore_algorithms.config import CorrectionConfig
from gcore_algorithms.layout import Records


@torch.no_grad()
def correction_weights(
    config: CorrectionConfig, old_logp: Tensor, rollout_logp: Tensor, records: Records
) -> tuple[Tensor, Tensor]:
    """(weights float[A], bounded bool[A]: where a weight was truncated or masked).

    A masked action stays in the normaliser: it counts as an action with loss 0.
    """
    log_weight = old_logp - rollout_logp
    if config.level != "token":
        log_weight = records.sums(log_weight)
        if config.level == "geometric":
            log_weight = log_weight / records.lengths
        log_weight = records.spread(log_weight)
    weight = log_weight.exp()
    within = weight.clamp(config.floor, config.cap)
    bounded = within != weight
    if config.kind == "mask":
        return weight.masked_fill(bounded, 0.0), bounded
    return within, bounded
