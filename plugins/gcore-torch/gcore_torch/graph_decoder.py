"""A decoder that computes a token for each row by one replay of a CUDA graph.

A graph has fixed shapes and addresses. So rows are filled up to a number for which there is a
graph, columns to a multiple of ``COLUMNS``, and the column that is written is a tensor. Graphs are
made when they are first needed, and again when the cache has grown and after every sleep.

Legend of shapes: as in ``gcore_torch.decoder``; R rows of a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gcore_language.images import Images
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gcore_torch.cache_columns import COLUMNS, cache_columns
from gcore_torch.compiling import compiled
from gcore_torch.decoder import FusedDecoder, LayerTensors
from gcore_torch.products import Products
from gcore_torch.replay import Pool, Replay, rows_of_graph

#: A deterministic run leaves out attention whose gradients do not repeat; here are no gradients.
_ANY_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class GraphDecoder(FusedDecoder):
    """A ``FusedDecoder`` for GPUs.

    On a CPU it computes the same without graphs,
    which is how it is tested there.

    compile: whether torch.compile makes kernels for what lies between attention and attention. It
        takes some 20 seconds, when the first graph is made.
    """

    def __init__(
        self,
        model: Any,
        capacity: int,
        products: Products,
        *,
        compile: bool = False,
        may_keep: bool = True,
    ) -> None:
        self._begin = compiled(begin_layer) if compile else begin_layer
        self._end = compiled(end_layer) if compile else end_layer
        self._graphs: dict[tuple[int, int], Replay[Tensor]] = {}
        self._longest = 0  # of the prompts that are being read
        self._logits_of_all: Tensor | None = None  # all graphs write here, [rows of the cache, V]
        super().__init__(model, capacity, products, may_keep=may_keep)
        self._pool = Pool(self._device)

    def _rows_for(self, rows: int) -> int:
        return rows_of_graph(rows, self._capacity)

    def _forget_graphs(self) -> None:
        """Drops graphs that read memory which has been given up, and the pool of these graphs."""
        self._graphs = {}
        self._pool = Pool(self._device)

    def _lay(self, shift: int, columns: int) -> None:
        """Moves the cached columns and makes room, see ``FusedDecoder._lay``.

        Columns left of the first one of every row are unused. A full cache drops them before it
        grows. As many columns stay as the longest prompt that is being read needs.
        """
        cache, tables = self._cache, self._cos
        if columns > cache.shape[4] and self.rows:
            unused = int(self._starts[: self.rows].min()) + shift
            more = max(0, min(unused, columns - 1 - self._longest))
            shift, columns = shift - more, columns - more
        first = max(0, -shift)
        last = self._column
        target = slice(first + shift, last + shift)
        if columns > cache.shape[4] or self._cache_rows > cache.shape[2]:
            self._cache = self._new_cache(cache_columns(columns, cache.shape[4]))
            self._cache[:, :, : self.rows, :, target] = cache[:, :, : self.rows, :, first:last]
        elif shift:
            for layer in cache:  # a layer at a time, so that the copy is small
                layer[:, : self.rows, :, target] = layer[:, : self.rows, :, first:last].clone()
        self._column += shift
        self._starts[: self.rows] += shift
        self._make_tables(self._cache.shape[4])
        if self._cache is not cache or self._cos is not tables:
            self._forget_graphs()

    @torch.no_grad()
    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        repeats: Sequence[int],
        images: Sequence[Images | None] = (),
    ) -> Tensor:
        """See ``Decoder.prefill``. Raises ValueError when more than ``capacity`` rows would run."""
        self._longest = max(map(len, prompts))
        with sdpa_kernel(_ANY_ATTENTION):
            logits = super().prefill(prompts, repeats, images)
        self._longest = 0
        return logits

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Tensor:
        """See ``Decoder.advance``. The logits change with the next call."""
        self._lay(0, self._column + 1)
        rows = rows_of_graph(self.rows, self._capacity)
        columns = -(-(self._column + 1) // COLUMNS) * COLUMNS
        graph = self._graphs.get((rows, columns))
        if graph is None:
            graph = self._make_graph(rows, columns)
        # rows that nobody asked for begin where they end: they see nothing but their own token
        numbers = np.full(rows + 1, self._column, np.int64)
        numbers[1 : 1 + self.rows] = self._starts[: self.rows]
        graph.inputs["tokens"][: self.rows].copy_(tokens)
        graph.inputs["numbers"].copy_(torch.from_numpy(numbers))
        logits = graph.run()[: self.rows]
        self._column += 1
        return logits

    def _make_graph(self, rows: int, columns: int) -> Replay[Tensor]:
        """Makes the graph of a pass over so many rows, whose attention reads so many columns.

        Its inputs are tokens int64[R], and numbers int64[1 + R]: the column to write, and the first
        column of each row.
        """
        inputs = {
            "tokens": torch.zeros(rows, dtype=torch.int64, device=self._device),
            "numbers": torch.full(
                (rows + 1,), self._column, dtype=torch.int64, device=self._device
            ),
        }
        if self._logits_of_all is None or len(self._logits_of_all) < rows:
            head = self._model.lm_head.weight
            shape = (self._cache_rows, len(head))
            self._logits_of_all = torch.empty(shape, dtype=head.dtype, device=self._device)
            self._forget_graphs()
        with sdpa_kernel(_ANY_ATTENTION):
            graph = Replay(inputs, lambda given: self._pass(given, columns), self._pool)
        self._graphs[rows, columns] = graph
        return graph

    def _pass(self, inputs: Mapping[str, Tensor], columns: int) -> Tensor:
        """Computes one token for each row; returns logits [R, V]."""
        tokens, numbers = inputs["tokens"], inputs["numbers"]
        rows = len(tokens)
        column, starts = numbers[:1], numbers[1:]
        positions = column - starts
        cos = self._cos.index_select(0, positions)[:, None]
        sin = self._sin.index_select(0, positions)[:, None]
        at = torch.arange(columns, device=self._device)
        hidden = (at < starts[:, None]) | (at > column)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        x = F.embedding(tokens, self._model.model.embed_tokens.weight)
        heads = self._query_heads
        for layer, cache in zip(self._layers, self._cache, strict=True):
            weights = layer.tensors()
            turned = self._begin(weights, x, cos, sin, self._kv_heads)
            fresh = turned[:, heads:].view(rows, 2, self._kv_heads, self._size).transpose(0, 1)
            cache[:, :rows].index_copy_(3, column, fresh[:, :, :, None])
            keys, values = cache[:, :rows, :, :columns]
            out = F.scaled_dot_product_attention(
                turned[:, :heads, None], keys, values, mask, enable_gqa=True
            )
            x = self._end(weights, x, out.reshape(rows, -1))
        assert self._logits_of_all is not None
        return self._logits_of_all[:rows].copy_(self._logits(x))

    def release(self, *, weights: bool) -> None:
        super().release(weights=weights)
        self._logits_of_all = None
        self._forget_graphs()


def begin_layer(
    weights: LayerTensors, x: Tensor, cos: Tensor, sin: Tensor, kv_heads: int
) -> Tensor:
    """Projects x [n, D] to rotated queries, rotated keys and values, [n, H + 2K, E].

    It computes what ``FusedDecoder`` does, and overwrites nothing, so that it can be compiled.

    cos, sin: [n, 1, E]; see ``FusedDecoder``.
    """
    normed = F.rms_norm(x, weights.norm_in.shape, weights.norm_in, weights.eps)
    projected = F.linear(normed, weights.qkv, weights.qkv_bias).unflatten(-1, (-1, cos.shape[-1]))
    split = projected.shape[1] - 2 * kv_heads
    q, k, v = projected.split([split, kv_heads, kv_heads], 1)
    if weights.norm_q is not None and weights.norm_k is not None:
        q = F.rms_norm(q, weights.norm_q.shape, weights.norm_q, weights.eps)
        k = F.rms_norm(k, weights.norm_k.shape, weights.norm_k, weights.eps)
    turning = torch.cat([q, k], 1)
    first, second = turning.chunk(2, -1)
    turned = turning * cos + torch.cat([second, first], -1) * sin
    return torch.cat([turned.to(v.dtype), v], 1)


def end_layer(weights: LayerTensors, x: Tensor, attended: Tensor) -> Tensor:
    """Does the rest of a layer after its attention, as ``_FusedLayer.finish`` does; [n, D].

    x: [n, D], the layer's input.
    attended: [n, H E], outputs of the attention.
    """
    x = x + F.linear(attended, weights.output, weights.output_bias)
    normed = F.rms_norm(x, weights.norm_out.shape, weights.norm_out, weights.eps)
    gate, up = F.linear(normed, weights.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, weights.down)
