"""Checks of an update that need no second pass: its direction, and how far it moves weights.

direction   a policy gradient raises the log-probs of actions whose advantage is positive
distance    AdamW moves a weight by no more than a bound that follows from its decay rates

Both hold whatever the gradient is. Which updates are looked at is ``resplit_every``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gcore_core.contract.errors import TrainingError
from gcore_language.ranks import Ranks

#: A loss whose derivatives correlate more with the advantages goes the wrong way. -1 is a plain
#: policy gradient; penalties and weights of sequences bring it nearer to 0.
_WRONG_WAY = 0.5
#: Variances below this share of the mean square are rounding.
_SPREAD = 1e-9
#: Of each tensor so many elements are looked at, of so many tensors: 64 MiB in float32.
_ELEMENTS = 1 << 18
_TENSORS = 64
#: What rounding may add to a step, as a share of the step and of the weight itself (float32).
_ROUNDING = 1e-3
_ULPS = 4 * 2.0**-23


@dataclass(kw_only=True)
class Direction:
    """Correlates the derivatives of a loss by log-probs with the advantages, over micro-batches.

    Both are taken less their means: so a loss that does not read advantages has no correlation.

    sums: over trained actions, of 1, derivative, advantage, their product and both squares.
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(6, dtype=torch.float64))

    def add(self, loss: Tensor, logp: Tensor, advantage: Tensor, mask: Tensor) -> None:
        """Adds a micro-batch; its loss can still go backward.

        loss: 0-d, a function of logp.
        logp, advantage, mask: [A]; logp carries gradient, or nothing is added.
        """
        if not (loss.requires_grad and logp.requires_grad):
            return
        (slope,) = torch.autograd.grad(loss, logp, retain_graph=True, allow_unused=True)
        if slope is None:
            return
        trained = mask != 0
        slopes = slope.detach()[trained].double()
        wanted = advantage[trained].double()
        terms = torch.ones_like(slopes), slopes, wanted, slopes * wanted, slopes**2, wanted**2
        self.sums = self.sums + torch.stack([term.sum() for term in terms]).cpu()

    def check(self, ranks: Ranks, where: str) -> None:
        """Raises TrainingError where the loss lowers what it should raise; all ranks call it."""
        count, *totals = ranks.sum(self.sums.tolist())
        if not count:
            return
        slope, wanted, product, slopes, squares = (total / count for total in totals)
        variances = slopes - slope**2, squares - wanted**2
        if not (variances[0] > _SPREAD * slopes and variances[1] > _SPREAD * squares):
            return  # all the same, so that nothing can be told
        correlation = (product - slope * wanted) / math.sqrt(variances[0] * variances[1])
        if not correlation > _WRONG_WAY:
            return
        raise TrainingError(
            "the loss has the wrong sign: it makes actions of positive advantage less likely",
            where=where,
            why=f"its derivatives by log-probs correlate by {correlation:+.2f} with the advantages,"
            " those of a policy gradient by less than 0",
            todo="see the sign of the objective's loss_sum: it is minimised",
            correlation=correlation,
        )


@runtime_checkable
class ShowsWeights(Protocol):
    """An engine whose weights can be looked at before and after ``update``."""

    def weights(self) -> Mapping[str, Tensor]:
        """Returns the live weights by name, as the optimizer steps them; of a sharded one its own
        part.
        """


def some_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies, float32[n], of the first elements of some tensors, evenly among all."""
    names = list(weights)
    chosen = names[:: -(-len(names) // _TENSORS)] if names else []
    return {name: _first(weights[name]).clone() for name in chosen}


def _first(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().reshape(-1)[:_ELEMENTS].float()


def adamw_bound(betas: Sequence[float], updates: int) -> float:
    """Returns by how many learning rates AdamW moves a weight at most, in its update ``updates``.

    By Cauchy and Schwarz |m| <= sqrt(v) sqrt(sum_i a_i^2 / b_i), where a_i and b_i are the weights
    that both moments give to the gradient of i updates ago; both are corrected for their start.

    betas: decay rates of the first and the second moment.
    updates: counted from 1.
    """
    first, second = betas
    if second == 0:
        return 1.0 if first == 0 else math.inf
    ratio = first * first / second
    terms = updates if ratio == 1 else (1 - ratio**updates) / (1 - ratio)
    squared = (1 - first) ** 2 / (1 - second) * terms
    return max(1.0, math.sqrt(squared * (1 - second**updates)) / (1 - first**updates))


def check_distance(
    before: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    rate: float,
    decay: float,
    bound: float,
    ranks: Ranks,
    where: str,
) -> None:
    """Raises TrainingError when an update moved a weight further than AdamW can; all ranks call it.

    before: what ``some_of`` gave before the update.
    rate, decay: learning rate and weight decay of the update.
    bound: what ``adamw_bound`` gave.
    """
    furthest, name = 0.0, ""
    for key, old in before.items():
        allowed = rate * (bound * (1 + _ROUNDING) + decay * old.abs()) + _ULPS * old.abs() + 1e-30
        ratio = float(((_first(weights[key]) - old).abs() / allowed).max()) if len(old) else 0.0
        if ratio > furthest:
            furthest, name = ratio, key
    worst = ranks.max([furthest])[0]
    if not worst > 1:
        return
    own = f"most in {name}; " if furthest == worst else ""
    raise TrainingError(
        f"an update moved a weight {worst:.3g} times as far as AdamW can at learning rate {rate:g}",
        where=where,
        why=f"{own}the optimizer keeps copies of the weights, and they are others than the weights "
        "were: old ones, from before the weights were loaded",
        todo="see that loading refreshes what the optimizer keeps",
        tensor=name,
    )
