"""Attention whose keys and values travel around a ring of ranks.

In step s a rank has the keys and values of the member s places before it, while the next ones are
on their way. The backward pass goes around once more: a member's gradients of keys and values start
at the next member, gather what each has to add, and end at home.

Only one other member's keys and values are held at a time, and no scores outlive a block.

Source: Liu, Zaharia and Abbeel 2023, "Ring attention with blockwise transformers".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gcore_language.context.groups import ContextGroups
from gcore_language.context.kernels import Kernel, Merged
from gcore_language.context.layout import Pair


@dataclass(frozen=True)
class Turns:
    """What one rank does in each step of the ring.

    groups: the rank's place in the ring.
    kernel: computes stretches.
    pairs: in each step, this rank's queries and the keys at hand that attend to each other.
    travelling: how many tokens of each member travel; they are its first.
    scale: of scores.
    """

    groups: ContextGroups
    kernel: Kernel
    pairs: Sequence[Sequence[Pair]]
    travelling: Sequence[int]
    scale: float

    def origin(self, step: int) -> int:
        """Returns the member whose keys and values this rank has in a step."""
        return (self.groups.member - step) % self.groups.ring


def ring_attention(query: Tensor, key: Tensor, value: Tensor, turns: Turns) -> Tensor:
    """Returns the attention of this rank's queries to all keys that they see.

    query: [S, H, E]. key, value: [S, K, E]. Returns [S, H, E].
    """
    result: Tensor = _Ring.apply(query, key, value, turns)
    return result


class _Exchange:
    """A tensor on its way to the next member, and one that comes from the member before.

    Nothing is sent where it would have no elements; the receiver knows that too.
    """

    def __init__(self, sent: Tensor, received: Tensor, groups: ContextGroups) -> None:
        ranks = groups.ring_ranks
        after = ranks[(groups.member + 1) % groups.ring]
        before = ranks[(groups.member - 1) % groups.ring]
        group = groups.ring_group
        self._sent = sent  # must live until it has gone
        self._received = received
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, after, group))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, before, group))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """Returns the received tensor when it is there."""
        for work in self._works:
            work.wait()
        return self._received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, turns: Turns) -> Tensor:
        merged = Merged.empty(query)
        both = torch.stack([key[: _own(turns)], value[: _own(turns)]])
        for step, pairs in enumerate(turns.pairs):
            coming = _pass_on(both, turns, step)
            keys, values = (key, value) if step == 0 else both
            for pair in pairs:
                part = turns.kernel.forward(
                    query[pair.query],
                    keys[pair.key],
                    values[pair.key],
                    causal=pair.causal,
                    scale=turns.scale,
                )
                merged.merge(pair.query, *part)
            if coming is not None:
                both = coming.wait()
        result = merged.result.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, merged.log_sum)
        ctx.turns = turns
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, result, log_sum = ctx.saved_tensors
        turns: Turns = ctx.turns
        gradient = gradient.contiguous()
        own = _own(turns)
        dtype = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros_like(query, dtype=dtype)
        home = torch.zeros(2, *key.shape, dtype=dtype, device=key.device)
        both = torch.stack([key[:own], value[:own]])
        returning: _Exchange | None = None
        for step, pairs in enumerate(turns.pairs):
            coming = _pass_on(both, turns, step)
            keys, values = (key, value) if step == 0 else both
            sums = home if step == 0 else torch.zeros_like(both, dtype=dtype)
            for pair in pairs:
                part = turns.kernel.backward(
                    gradient[pair.query],
                    query[pair.query],
                    keys[pair.key],
                    values[pair.key],
                    result[pair.query],
                    log_sum[pair.query],
                    causal=pair.causal,
                    scale=turns.scale,
                )
                of_query[pair.query] += part.query
                sums[0, pair.key] += part.key
                sums[1, pair.key] += part.value
            if step > 0:
                returning = _gather(sums, returning, turns, step)
            if coming is not None:
                both = coming.wait()
        if returning is not None:
            home[:, :own] += returning.wait()
        return of_query.to(query.dtype), home[0].to(key.dtype), home[1].to(value.dtype), None


def _own(turns: Turns) -> int:
    return turns.travelling[turns.groups.member]


def _pass_on(both: Tensor, turns: Turns, step: int) -> _Exchange | None:
    """Sends keys and values on, and receives those of the next step; None in the last one.

    both: [2, T, K, E], keys and values.
    """
    if step + 1 == len(turns.pairs):
        return None
    tokens = turns.travelling[turns.origin(step + 1)]
    return _Exchange(both, both.new_empty(2, tokens, *both.shape[2:]), turns.groups)


def _gather(sums: Tensor, returning: _Exchange | None, turns: Turns, step: int) -> _Exchange:
    """Adds what the members before found, and sends the sum on.

    sums: [2, T, K, E], this rank's gradients of the keys and values at hand.
    returning: those of the members before, of the same keys; None in the first step of others.
    """
    if returning is not None:
        sums += returning.wait()
    tokens = turns.travelling[turns.origin(step + 1)]
    return _Exchange(sums, sums.new_empty(2, tokens, *sums.shape[2:]), turns.groups)
