"""Importance weights for actions that another engine or older weights sampled, and a mask of old
records.

A generator computes the log-probs of the same weights a little differently from the trainer
(kernels, precision, routing), so its samples are slightly off policy before the first update.
Weights exp(old_logp - rollout_logp) correct that. Unbounded, they have a large variance, so they
are truncated (clipped to the bounds) or masked (set to 0 outside the bounds).

A mask of old records has whole records teach nothing. A record is masked where both hold:

    it is old     one of its actions is older than a bound
    it is far     the policy has moved away from what sampled it

So an old record that the policy still agrees with teaches.

Sources:

- Truncated: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
  (2025).
- Masked on both sides, per action (IcePop): Ling Team, "Every Step Evolves", arXiv:2510.18855. Its
  bounds, 0.5 and 5, are the defaults of a mask; with a ``floor`` of 0 nothing is masked below.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gcore_algorithms.config import CorrectionConfig, StaleMaskConfig
from gcore_algorithms.layout import Records
from gcore_core.contract.algorithms import LOG_RATIO_LIMIT


@torch.no_grad()
def correction_weights(
    config: CorrectionConfig, old_logp: Tensor, rollout_logp: Tensor, records: Records
) -> tuple[Tensor, Tensor]:
    """Returns weights float[A], and bool[A] that marks those that were truncated or masked.

    config: ``level`` says of what the ratio is taken: "token" of each action; "geometric" of the
        record, as the geometric mean over its actions; otherwise of the whole record, the product.
    old_logp: float[A], of the policy that ratios are taken against: by the trainer, before the
        first update of the step, or interpolated.
    rollout_logp: float[A], by the generator.
    records: to which record each action belongs.

    The log of a weight is clamped to +-LOG_RATIO_LIMIT: that of the record where the ratio is the
    record's. A masked action still counts in the loss's normaliser, as an action of loss 0.
    """
    log_weight = old_logp - rollout_logp
    if config.level != "token":
        log_weight = records.sums(log_weight)
        if config.level == "geometric":
            log_weight = log_weight / records.lengths
        log_weight = records.spread(log_weight)
    weight = log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    within = weight.clamp(*config.bounds())
    bounded = within != weight
    if config.kind == "mask":
        return weight.masked_fill(bounded, 0.0), bounded
    return within, bounded


@torch.no_grad()
def stale_records(
    config: StaleMaskConfig, age: Tensor, log_ratio: Tensor, records: Records
) -> Tensor:
    """Returns bool[A], which marks all actions of records that are old and far from the policy.

    config: ``older_than`` is set.
    age: int64[A], how many versions older the weights are that sampled the action.
    log_ratio: float[A], log-prob under the trainer's policy minus the generator's.
    records: to which record each action belongs.

    A marked action still counts in the loss's normaliser, as an action of loss 0.
    """
    is_old = records.sums((age > config.older_than).to(log_ratio.dtype)) > 0
    mean = records.sums(log_ratio) / records.lengths
    ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    is_near = (ratio >= config.floor) & (ratio <= config.cap)
    return records.spread(is_old & ~is_near)
