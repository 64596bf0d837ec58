"""Ranks swap tokens for heads, so that each has all tokens of some heads.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def to_heads(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Returns all tokens of this rank's heads, [sum(sizes), H / ranks, E].

    x: [own tokens, H, E].
    sizes: how many tokens each rank has.
    """
    return x if group is None else _ToHeads.apply(x, tuple(sizes), group)


def to_tokens(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Returns all heads of this rank's tokens, [own tokens, H, E]; undoes ``to_heads``."""
    return x if group is None else _ToTokens.apply(x, tuple(sizes), group)


def spread_heads(key: Tensor, ulysses: int) -> Tensor:
    """Returns keys or values with heads for all ranks: repeated where there are fewer.

    key: [S, K, E]; K divides ``ulysses``, or the other way round.
    """
    heads = key.shape[1]
    return key if heads % ulysses == 0 else key.repeat_interleave(ulysses // heads, 1)


def _swap_to_heads(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    ranks = len(sizes)
    own, heads, channels = x.shape
    sent = x.unflatten(1, (ranks, heads // ranks)).transpose(0, 1).contiguous()
    row = heads // ranks * channels
    received = x.new_empty(sum(sizes), heads // ranks, channels)
    dist.all_to_all_single(
        received.view(-1),
        sent.view(-1),
        [size * row for size in sizes],
        [own * row] * ranks,
        group=group,
    )
    return received


def _swap_to_tokens(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    ranks = len(sizes)
    own = sizes[dist.get_rank(group)]
    _, heads, channels = x.shape
    row = heads * channels
    received = x.new_empty(ranks, own, heads, channels)
    dist.all_to_all_single(
        received.view(-1),
        x.contiguous().view(-1),
        [own * row] * ranks,
        [size * row for size in sizes],
        group=group,
    )
    return received.transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = sizes
        ctx.group = group
        return _swap_to_heads(x, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _swap_to_tokens(gradient, ctx.sizes, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = sizes
        ctx.group = group
        return _swap_to_tokens(x, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _swap_to_heads(gradient, ctx.sizes, ctx.group), None, None
