"""Attention of one stretch of queries to one stretch of keys, without a matrix of all scores.

Shapes are [S, H, E]: tokens first, then heads, then channels. Keys and values have K heads, and
query head h goes with key head h // (H / K), as in transformers' ``repeat_kv``.

Both kernels work in blocks and give, beside the result, the logarithm of the sum of the exponential
scores of each query: with it results over different keys can be merged, and scores computed again
in the backward pass (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao
2023, "FlashAttention-2").

    flash    torch's own kernel for CPUs, one call for a stretch
    blocks   products of blocks, on any device
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

#: Queries and keys of one block of scores.
_BLOCK = 512


class Gradients(NamedTuple):
    """Gradients of queries [S, H, E], keys and values [T, K, E]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Kernel(Protocol):
    """Attention of queries [S, H, E] to keys and values [T, K, E].

    causal: query s sees keys 0 to s, and S = T; else it sees all keys.
    scale: what products of queries and keys are multiplied by.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (result [S, H, E], log-sums [S, H], at least float32).

        The result may be wider than the queries, too.
        """

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        result: Tensor,
        log_sum: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Returns this stretch's part of the gradients, which may be wider than the queries.

        gradient: [S, H, E], of the result.
        result, log_sum: of the queries over all the keys they see, here and elsewhere.
        """


def kernel_for(device: torch.device) -> Kernel:
    """Returns the fastest kernel for a device."""
    has_flash = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return FlashKernel() if device.type == "cpu" and has_flash else BlockKernel()


class FlashKernel:
    """Torch's attention for CPUs, which is private to torch but gives the log-sums."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        groups = query.shape[1] // key.shape[1]
        result, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _by_group(query, groups),
            _repeated(key, groups),
            _repeated(value, groups),
            0.0,
            causal,
            scale=scale,
        )
        return _by_token(result), log_sum.permute(2, 1, 0).flatten(1)

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        result: Tensor,
        log_sum: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        groups = query.shape[1] // key.shape[1]
        sums = log_sum.unflatten(1, (-1, groups)).permute(2, 1, 0)
        of_query, of_key, of_value = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _by_group(gradient, groups),
                _by_group(query, groups),
                _repeated(key, groups),
                _repeated(value, groups),
                _by_group(result, groups),
                sums.contiguous(),
                0.0,
                causal,
                scale=scale,
            )
        )
        return Gradients(
            _by_token(of_query), of_key.sum(0).transpose(0, 1), of_value.sum(0).transpose(0, 1)
        )


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Returns a view [groups, K, S, E] of [S, K groups, E]."""
    return x.unflatten(1, (-1, groups)).permute(2, 1, 0, 3)


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Returns a view [groups, K, T, E] of [T, K, E], the same for all groups."""
    return x.transpose(0, 1).expand(groups, -1, -1, -1)


def _by_token(x: Tensor) -> Tensor:
    """Returns [S, K groups, E] of [groups, K, S, E]."""
    return x.permute(2, 1, 0, 3).flatten(1, 2)


class BlockKernel:
    """Products of blocks of queries and keys; scores are held for one block at a time."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        results = []
        log_sums = []
        for start in range(0, len(query), _BLOCK):
            rows = slice(start, start + _BLOCK)
            result, log_sum = self._rows(query[rows], key, value, start, causal, scale)
            results.append(result)
            log_sums.append(log_sum)
        return torch.cat(results), torch.cat(log_sums)

    def _rows(
        self, query: Tensor, key: Tensor, value: Tensor, first: int, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns result and log-sums of one block of queries, the first of which is ``first``."""
        parts = Merged.empty(query)
        for start, stop in _blocks(len(key), first + len(query), causal):
            scores = _scores(query, key[start:stop], first, start, causal, scale)
            log_sum = scores.logsumexp(-1)
            weights = (scores - log_sum[..., None]).exp().to(value.dtype)
            result = torch.einsum("kgst,tke->skge", weights, value[start:stop]).flatten(1, 2)
            parts.merge(slice(None), result, log_sum.permute(2, 0, 1).flatten(1))
        return parts.result, parts.log_sum

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        result: Tensor,
        log_sum: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        groups = query.shape[1] // key.shape[1]
        # sums over blocks, which in bfloat16 would lose more with each block
        wide = torch.promote_types(query.dtype, torch.float32)
        sums = Gradients(*(torch.zeros_like(x, dtype=wide) for x in (query, key, value)))
        inner = (gradient.to(wide) * result.to(wide)).sum(-1)  # [S, H]
        for first in range(0, len(query), _BLOCK):
            rows = slice(first, first + _BLOCK)
            q = query[rows]
            g = gradient[rows].unflatten(1, (-1, groups))
            log_sums = log_sum[rows].unflatten(1, (-1, groups)).permute(1, 2, 0)[..., None]
            inners = inner[rows].unflatten(1, (-1, groups)).permute(1, 2, 0)[..., None]
            for start, stop in _blocks(len(key), first + len(q), causal):
                keys = slice(start, stop)
                scores = _scores(q, key[keys], first, start, causal, scale)
                weights = (scores - log_sums).exp()
                of_weights = torch.einsum("skge,tke->kgst", g, value[keys])
                of_scores = (weights * (of_weights - inners) * scale).to(query.dtype)
                sums.value[keys] += torch.einsum("kgst,skge->tke", weights.to(g.dtype), g)
                sums.query[rows] += torch.einsum("kgst,tke->skge", of_scores, key[keys]).flatten(
                    1, 2
                )
                sums.key[keys] += torch.einsum(
                    "kgst,skge->tke", of_scores, q.unflatten(1, (-1, groups))
                )
        return sums


def _blocks(keys: int, seen: int, causal: bool) -> list[tuple[int, int]]:
    """Returns where the blocks of keys begin and end that any of the queries sees."""
    last = min(keys, seen) if causal else keys
    return [(start, min(start + _BLOCK, last)) for start in range(0, last, _BLOCK)]


def _scores(
    query: Tensor, key: Tensor, first: int, start: int, causal: bool, scale: float
) -> Tensor:
    """Returns scores [K, H / K, S, T], at least float32; -inf where a query does not see a key.

    first, start: places of the first query and the first key.
    """
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("skge,tke->kgst", query.unflatten(1, (-1, groups)), key) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal and start + len(key) > first + 1:
        places = torch.arange(first, first + len(query), device=query.device)
        keys = torch.arange(start, start + len(key), device=query.device)
        scores.masked_fill_(keys > places[:, None], float("-inf"))
    return scores


class Merged:
    """Attention of queries over the keys seen so far.

    result: [S, H, E], at least float32.
    log_sum: [S, H], -inf where nothing has been seen.
    """

    def __init__(self, result: Tensor, log_sum: Tensor) -> None:
        self.result = result
        self.log_sum = log_sum

    @staticmethod
    def empty(query: Tensor) -> Merged:
        """Returns zeros for queries [S, H, E] that have seen nothing yet."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        result = torch.zeros_like(query, dtype=dtype, memory_format=torch.contiguous_format)
        return Merged(result, torch.full_like(result[..., 0], float("-inf")))

    def merge(self, rows: slice, result: Tensor, log_sum: Tensor) -> None:
        """Adds what some queries saw of other keys.

        result, log_sum: [S, H, E] and [S, H] of the queries ``rows``. The keys are new to them.
        """
        old = self.log_sum[rows]
        both = torch.logaddexp(old, log_sum)
        self.result[rows] *= (old - both).exp()[..., None]
        self.result[rows] += result * (log_sum - both).exp()[..., None]
        self.log_sum[rows] = both
