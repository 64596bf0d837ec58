"""Estimates of KL(policy || reference) from one action each.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. With
d = log policy(a) - log reference(a) and actions drawn from the policy:

    k1 = d               unbiased, may be negative, noisy
    k2 = d^2 / 2         biased, never negative
    k3 = exp(-d) - 1 + d unbiased, never negative; large where the reference likes an action far
    better than the policy

k3 alone exponentiates: where d is below -LOG_RATIO_LIMIT, it has the value of the limit and no
gradient. k1 and k2 stay as they are, at any d. So does k3 at a large positive d, where the policy
has left the reference farthest and the penalty must pull.

As a *reward* penalty, k1 gives the right gradient. As a *loss* that is differentiated (actions from
the policy), the expected gradient of k1 is zero, that of k2 is the gradient of KL(policy ||
reference), and that of k3 is the gradient of KL(reference || policy), equal to it to first order
near the reference. Proofs: Liu et al., "Rethinking KL Regularization in RLHF", arXiv:2510.01555.
None of them is weighted for actions drawn from older weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gcore_core.contract.algorithms import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor


def kl(estimator: str, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Returns the estimate of each action, float[A] in nats, with gradient to ``logp``.

    estimator: "k1", "k2" or "k3".
    """
    difference = logp - ref_logp
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference * difference
    if estimator == "k3":
        difference = difference.clamp(min=-LOG_RATIO_LIMIT)
        return (-difference).expm1() + difference
    raise ValueError(f"no KL estimator {estimator!r}; there are k1, k2 and k3")
