"""A decoder whose logits are those of the trainer's forward pass, bit for bit.

It computes one token for each row, as ``gcore_language.flat`` computes all tokens of a record:
with the same matrices, and attention over keys that lie as they lie there. What a kernel does with
a row must then not depend on how many rows are beside it. Libraries have other kernels for few
rows, so few are filled up with zeros. Whether that is enough on this machine is tried when a
generator starts (``gcore_torch.steady.SteadyScorer.decodes_alike``).

All rows begin together, prompts at column 0 and answers behind the longest prompt, at a multiple of
16. An example of two prompts, p p and p p p, with two actions each, and 4 in place of 16:

    column   0  1  2  3 | 4  5  6  7
    row 0    p  p  -  - | a  b  -  -
    row 1    p  p  p  - | a  b  -  -

Legend of shapes: as in ``gcore_torch.decoder``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gcore_language import flat
from gcore_language.images import Images
from gcore_language.packing import STEADY_KEYS, Sample, build, steady_width
from torch import Tensor

from gcore_core.contract.columns import Columns

#: Queries of a product that have the bits of the same queries among many others.
_LEAST_QUERIES = 4
#: Most tokens of one forward pass over prompts.
_PREFILL_TOKENS = 16384


class SteadyDecoder:
    """A decoder for models that go through the layout "flat"; see ``Decoder``.

    Its bits are the trainer's while prompts and actions together have at most
    ``packing.STEADY_KEYS`` columns; see ``packing.is_steady``.

    model: of transformers, on which ``flat.install`` was called.
    capacity: most rows.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        self.rows = 0
        self._model = model
        self._capacity = capacity
        config = model.config
        self._query_heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._size = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._weights: list[flat.LayerWeights] = []
        self._turns = torch.empty(0)
        self._lengths = np.zeros(capacity, np.int64)  # tokens of each row's prompt
        self._width = 0  # columns of prompts
        self._actions = 0  # cached of each row
        self._cache_rows = 0  # most that ran at once
        self._cache = self._new_cache(0)

    def _new_cache(self, columns: int) -> Tensor:
        """Returns a cache [layers, 2, its rows, K, columns, E]: keys, then values."""
        layers = len(self._model.model.layers)
        # zeros, because a masked column still takes part in products, and 0 * nan is nan
        return torch.zeros(layers, 2, self._cache_rows, self._kv_heads, columns, self._size)

    def _make_room(self, columns: int) -> None:
        there = self._cache.shape[4]
        if columns <= there and self._cache_rows <= self._cache.shape[2]:
            return
        live = self._cache
        wider = max(columns, min(2 * columns, STEADY_KEYS))
        self._cache = self._new_cache(wider if columns > there else there)
        self._cache[:, :, : self.rows, :, : live.shape[4]] = live[:, :, : self.rows]

    @torch.no_grad()
    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        repeats: Sequence[int],
        images: Sequence[Images | None] = (),
    ) -> Tensor:
        """See ``Decoder.prefill``. Raises ValueError while rows run, or for too many."""
        if self.rows or sum(repeats) > self._capacity:
            raise ValueError(f"{sum(repeats)} rows beside {self.rows}, of {self._capacity}")
        layers = self._model.model.layers
        self._weights = [flat.LayerWeights.of(layer, self._size) for layer in layers]
        self._width = steady_width(max(map(len, prompts)))
        self._actions = 0
        self._cache_rows = max(self._cache_rows, sum(repeats))
        self._make_room(self._width)
        of_row = np.repeat(np.arange(len(prompts)), repeats)
        self._lengths[: len(of_row)] = np.array([len(prompt) for prompt in prompts])[of_row]
        hidden = torch.cat(
            [
                self._read(prompts[first:stop], of_row, first)
                for first, stop in _cuts([len(prompt) for prompt in prompts])
            ]
        )
        self.rows = len(of_row)
        logits = flat.of_enough_rows(self._model.get_output_embeddings(), hidden)
        return logits.index_select(0, torch.from_numpy(of_row))

    def _read(self, prompts: Sequence[np.ndarray], of_row: np.ndarray, first: int) -> Tensor:
        """Reads prompts in one pass into the cache; returns their last hidden states [n, D].

        of_row: int64[rows], the prompt of each row.
        first: the number of the first of these prompts.
        """
        columns = columns_of(np.zeros(1, np.int32))  # its one action is never fed
        batch = build(
            [
                [Sample(index=i, ordinal=i, prompt=prompt, columns=columns)]
                for i, prompt in enumerate(prompts)
            ],
            "flat",
            torch.device("cpu"),
            steady=True,
        )
        kept: list[Tensor] = []
        assert batch.flat is not None
        hidden = flat.forward(self._model, batch.ids, batch.flat, kept)
        rows = ((of_row >= first) & (of_row < first + len(prompts))).nonzero()[0]
        source = torch.from_numpy(of_row[rows] - first)
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        for cache, pairs in zip(self._cache, kept, strict=True):
            by_prompt = pairs.view(2, self._kv_heads, len(prompts), -1, self._size).transpose(1, 2)
            cache[:, span, :, : by_prompt.shape[3]] = by_prompt.index_select(1, source)
        return hidden

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Tensor:
        """See ``Decoder.advance``."""
        rows = self.rows
        column = self._width + self._actions
        columns = self._width + steady_width(self._actions + 1)
        self._make_room(columns)
        base = self._model.model
        x = F.embedding(tokens, base.embed_tokens.weight)
        turn = self._turns_at(self._lengths[:rows] + self._actions, x)
        bias = self._bias(column, columns)
        heads = self._query_heads
        pairs = rows * self._kv_heads  # batch of the products: each row's key-value heads
        turning = (heads + self._kv_heads) * self._size
        for layer, weights, cache in zip(base.layers, self._weights, self._cache, strict=True):
            projected = flat.project(layer, weights, x, heads, self._kv_heads, self._size)
            table = flat.turned(projected, turn, turning, self._size).view(rows, -1, self._size)
            cache[:, :rows, :, column] = (
                table[:, heads:].view(rows, 2, self._kv_heads, self._size).transpose(0, 1)
            )
            keys, values = cache[:, :rows].flatten(1, 2)[:, :, :columns]
            queries = table[:, :heads].reshape(pairs, -1, self._size)
            scores = of_enough_queries(queries, keys.mT)
            scores.view(rows, self._kv_heads, -1, columns).add_(bias)
            attended = of_enough_queries(scores.softmax(-1), values)
            x = flat.finish(layer, weights, x, attended.reshape(rows, -1))
        self._actions += 1
        return flat.of_enough_rows(self._model.get_output_embeddings(), flat.norm(base.norm, x))

    def _turns_at(self, positions: np.ndarray, like: Tensor) -> Tensor:
        """Returns the rotations complex64[n, 1, E/2] of positions int64[n]."""
        if self._actions == 0:  # anew for each batch of rows, so that no fault of a table stays
            reach = torch.arange(int(positions.max()) + STEADY_KEYS)
            self._turns = flat.turns(self._model, reach, like[None])
        return self._turns.index_select(0, torch.from_numpy(positions))

    def _bias(self, column: int, columns: int) -> Tensor:
        """Returns what is added to scores, float32[B or 1, 1, 1, columns]: 0, or -inf if unseen."""
        lengths = self._lengths[: self.rows]
        if (lengths == lengths[0]).all():
            lengths = lengths[:1]
        at = np.arange(columns)
        seen = (at < lengths[:, None]) | ((at >= self._width) & (at <= column))
        return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))[:, None, None]

    def drop(self, removed: np.ndarray) -> np.ndarray:
        """See ``Decoder.drop``. The last rows that stay move into the gaps."""
        stay = int(len(removed) - removed.sum())
        order = np.arange(stay)
        gaps = removed[:stay].nonzero()[0]
        if len(gaps):
            moved = stay + (~removed[stay:]).nonzero()[0]
            order[gaps] = moved
            to, source = torch.from_numpy(gaps), torch.from_numpy(moved)
            live = self._cache[..., : self._width + self._actions, :]
            live[:, :, to] = live[:, :, source]
            self._lengths[gaps] = self._lengths[moved]
        self.rows = stay
        return order

    def clear(self) -> None:
        self.rows = 0

    @property
    def cache_bytes(self) -> int:
        return int(self._cache.nbytes)

    def release(self, *, weights: bool) -> None:
        self._cache = self._new_cache(0)
        if weights:
            self._weights = []

    def take_weights(self) -> None:
        """Does nothing: weights are put together for each batch of rows."""


def of_enough_queries(queries: Tensor, matrices: Tensor) -> Tensor:
    """Returns the products [n, Q, T] as they are for the same queries among many others.

    queries: [n, Q, D]. matrices: [n, D, T].
    """
    count = queries.shape[1]
    lacking = _LEAST_QUERIES - count
    if lacking <= 0:
        return torch.bmm(queries, matrices)
    return torch.bmm(F.pad(queries, (0, 0, 0, lacking)), matrices)[:, :count].contiguous()


def _cuts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (first, stop) of runs of prompts that are read together."""
    cuts = []
    first = tokens = 0
    for place, length in enumerate(lengths):
        if place > first and tokens + length > _PREFILL_TOKENS:
            cuts.append((first, place))
            first = place
            tokens = 0
        tokens += length
    return [*cuts, (first, len(lengths))]


def columns_of(actions: np.ndarray) -> Columns:
    """Returns the columns of a record without its prompt, with log-probs of 0."""
    return {
        "action_ids": actions,
        "action_mask": np.ones(len(actions), np.uint8),
        "logp": np.zeros(len(actions), np.float32),
        "temperature": np.ones((), np.float32),
    }
