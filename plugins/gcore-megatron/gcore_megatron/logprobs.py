"""Computes log-probs of tokens, and entropies, from logits whose vocabulary is split over ranks.

No rank ever holds the logits of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: Replaces the logits of the vocabulary's padding. It is finite, because 0 times it must be 0.
_NEVER = -1e30


class _ActionLogp(torch.autograd.Function):
    """Softmax over the ranks of a group.

    Let x be the logits divided by the temperature, minus their maximum, and Z the sum of exp x over
    all ranks. Then the log-prob of target t is x_t - log Z, and the entropy H is log Z - sum p x.
    An action has n targets; whatever n is, as many tensors as wide as the logits are made.

    targets: int64[A, n].
    first: number of this rank's first row of the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        most = logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        x = logits - most[:, None]
        exp = x.exp()
        is_local = (targets >= first) & (targets < first + x.shape[1])
        place = torch.where(is_local, targets - first, 0)
        target_logits = x.gather(1, place) * is_local
        sums = torch.cat([exp.sum(-1)[:, None], (exp * x).sum(-1)[:, None], target_logits], 1)
        dist.all_reduce(sums, group=group)
        total, weighted = sums[:, 0], sums[:, 1]
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(x, log_total, entropy, place, is_local)
        return sums[:, 2:] - log_total[:, None], entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logp: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None]:
        x, log_total, entropy, place, is_local = ctx.saved_tensors
        logp = x - log_total[:, None]
        p = logp.exp()
        # d log p(t) / dx = [t] - p, summed over the targets; dH / dx = -p (log p + H)
        of_all = grad_logp.sum(1, keepdim=True)
        grad = p * (logp + entropy[:, None]) * -grad_entropy[:, None] - p * of_all
        grad.scatter_add_(1, place, grad_logp * is_local)
        return grad, None, None, None


class _Sum(torch.autograd.Function):
    """Sum over a group whose ranks compute the same from it; each keeps its own part's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_over(x: Tensor, group: Any) -> Tensor:
    """Returns the sum of ``x`` over the ranks of a group; the gradient passes unchanged."""
    summed: Tensor = _Sum.apply(x, group)
    return summed


def action_logp(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, vocabulary: int, group: Any
) -> tuple[Tensor, Tensor]:
    """Returns (log-probs float32[A, n], entropies float32[A]), the same on all ranks of ``group``.

    logits: [A, r], this rank's part; the ranks of the group hold r rows of the vocabulary each, in
        order.
    targets: int64[A, n], the tokens whose log-probs are wanted; a row may name a token twice.
    temperature: float32[A]; None for 1.
    vocabulary: size of the vocabulary; the rows after it are padding.
    """
    x = logits.float()
    if temperature is not None:
        x = x / temperature[:, None]
    first = group.rank() * x.shape[1]
    if first + x.shape[1] > vocabulary:
        filler = torch.arange(first, first + x.shape[1], device=x.device) >= vocabulary
        x = x.masked_fill(filler, _NEVER)
    logp, entropy = _ActionLogp.apply(x, targets, first, group)
    return logp, entropy


def in_chunks(
    run: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    actions: int,
) -> tuple[Tensor, Tensor]:
    """Calls ``run(hidden, targets, temperature)`` on chunks of actions, and joins the results.

    The backward pass computes each chunk again, so that it holds the logits of one chunk at a time.

    actions: the most actions of a chunk.
    """
    if len(hidden) <= actions:
        return run(hidden, targets, temperature)
    parts = []
    for start in range(0, len(hidden), actions):
        span = slice(start, start + actions)
        chunk = (hidden[span], targets[span], None if temperature is None else temperature[span])
        parts.append(checkpoint(run, *chunk, use_reentrant=False))
    logp, entropies = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropies)
