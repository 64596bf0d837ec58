"""The proximal policy of stale actions, without a forward pass of its own.

Decoupled PPO has three policies: the one that sampled an action, the proximal one that the ratio
and its clip are taken against, and the one that is trained. With ``old_logprobs: recompute`` the
proximal policy is that of the weights that the step begins with, whose log-probs cost a forward
pass. Here it is about that of one version before them, and its log-prob is interpolated between the
two that are known anyway. The weights of an action that is d versions old are d versions behind the
policy, and d - 1 of these lead to the proximal one:

    log prox = a log rollout + (1 - a) log policy,   a = 1 / d, and 1 where d is 0

Nothing flows back through it, so the gradient of the ratio policy / prox is that of the policy.

Sources:

- Decoupled: Hilton, Cobbe, Schulman, "Batch size-invariance for policy optimization",
  arXiv:2110.00641.
- Interpolated: "A-3PO", arXiv:2512.06547, which AReaL has as ``prox_logp_method: loglinear``.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def interpolated_logp(age: Tensor, rollout_logp: Tensor, logp: Tensor) -> Tensor:
    """Returns the proximal policy's log-prob of each action, float[A], without gradient.

    age: int64[A], how many versions older the weights are that sampled the action.
    rollout_logp: float[A], under those weights.
    logp: float[A], under the policy that is trained.

    Of ages 0 and 1 it is ``rollout_logp`` to the last bit.
    """
    share = 1.0 / age.clamp(min=1).to(logp.dtype)
    mixed = share * rollout_logp + (1.0 - share) * logp
    return torch.where(age <= 1, rollout_logp, mixed)
