"""Decoders: a batch of running samples that gets one more token for each of them per call.

A row is one running sample with its cached keys and values. Samples join and leave the batch at any
call. What a row has read can be parked: a prompt that begins with it goes on from there.

    FusedDecoder         models of the families of ``gcore_language.flat``; on a GPU it is a
                         ``graph_decoder.GraphDecoder``
    ImageTextDecoder     those of ``gcore_language.images``
    TransformersDecoder  every other causal language model

Legend of shapes: B running rows, D hidden size, H query heads, K key-value heads, E head size, T
cached positions, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from gcore_language.flat import GROWING_ROPES, family_supported
from gcore_language.image_text import show
from gcore_language.images import Images, takes_images
from gcore_language.routing import Routers, small
from torch import Tensor

from gcore_torch.beginnings import Beginning, Beginnings, common_length
from gcore_torch.cache_columns import PARKED_BYTES, columns_on_cpu
from gcore_torch.products import Products

#: Most tokens, padding included, of one forward pass over prompts.
_PREFILL_TOKENS = 16384
#: A beginning of fewer tokens that prompts have in common is read with each of them.
_KEPT_LEAST = 16
#: Two tables of sines and cosines that differ by no more are the same one, computed twice. Rounding
#: to bfloat16 changes them by 2e-3.
_SAME_TABLE = 1e-5


class Decoder(Protocol):
    """A batch of running samples. Rows are numbered from 0; new ones come last.

    rows: how many there are.
    """

    rows: int

    @property
    def cache_bytes(self) -> int:
        """Bytes that cached keys and values take."""

    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        repeats: Sequence[int],
        images: Sequence[Images | None] = (),
    ) -> Tensor:
        """Adds rows and returns the logits [sum(repeats), V] of the token that follows each.

        prompts: int[P] token ids, each of its own length; each is read once.
        repeats: how many rows start with each prompt.
        images: of each prompt; only an ``ImageTextDecoder`` reads them.
        Raises ValueError when a decoder of limited capacity has no room for the rows.
        """

    def advance(self, tokens: Tensor) -> Tensor:
        """Appends one token to each row and returns the logits [B, V] of the token that follows.

        tokens: int64[B].
        """

    def drop(self, removed: np.ndarray) -> np.ndarray:
        """Removes rows and renumbers the others.

        removed: bool[B], true for rows to remove.
        Returns int64[rows that stay]: for each row, in the new order, its old number.
        """

    def clear(self) -> None:
        """Removes all rows."""

    def release(self, *, weights: bool) -> None:
        """Frees the cache, and on request this decoder's references to the weights.

        ``take_weights`` and then ``clear`` must be called before the next token.
        """

    def take_weights(self) -> None:
        """Takes the model's weights again: when they are back in memory, or others have come."""


class KeepingDecoder(Decoder, Protocol):
    """A decoder that keeps what rows have read.

    read_tokens: of prompts, how many it has read so far.
    kept_tokens: of prompts, how many it did not read, because it had read them before.
    """

    read_tokens: int
    kept_tokens: int

    def park(self, row: int, ids: np.ndarray, experts: Sequence[np.ndarray] = ()) -> None:
        """Keeps what a row has read, which leaves next, for prompts that begin with it.

        It is kept until weights are released or taken, until ``clear``, and as long as there is
        room: what is kept takes at most as much memory as the cache, or 256 MiB, and is at most as
        many rows as can run.

        ids: int[T], all tokens that the row has read.
        experts: pieces [t, L, k] of the experts of these tokens; none where the model has none, or
            where records are not to name them.
        """

    def unread(self, prompt: np.ndarray) -> int:
        """Returns how many tokens of a prompt would be read."""


class FusedDecoder:
    """A decoder for Llama-like models that shares their weights.

    Query, key and value matrices become views of one matrix, gate and up of another, so loading the
    model's parameters in place loads this decoder's too.

    All rows write their next key and value into the same column of the cache. A row that joins is
    placed so that its prompt ends right before that column; columns left of its first one are
    masked. An example: row 0 runs, row 1 joins with a prompt of two tokens, C is the next column.

        column   0  1  2  3  C
        row 0    p  p  a  b
        row 1    -  -  p  p

    model: of transformers; see ``gcore_language.flat.family_supported``.
    capacity: most rows.
    products: the form of products with weights.
    actions: most tokens of a row behind its prompt, for which the cache has room.
    may_keep: whether rows may be parked, and the common beginning of prompts is read once and kept.
        Then the last bits of what follows depend on prompts of earlier calls.
    """

    def __init__(
        self,
        model: Any,
        capacity: int,
        products: Products,
        actions: int = sys.maxsize,
        may_keep: bool = True,
    ) -> None:
        self.rows = self.read_tokens = self.kept_tokens = 0
        self._model = model
        self._capacity = capacity
        self._actions = actions
        self._may_keep = may_keep
        self._latest: np.ndarray | None = None  # a prompt of the latest call that began anew
        # what prompts begin with: keys and values [layers, 2, K, S, E]
        self._kept: Beginnings[Tensor] = Beginnings(capacity)
        self._cache = torch.empty(0)
        self._products = products
        config = model.config
        self._query_heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._size = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._layers = [_FusedLayer(layer, self._products) for layer in model.model.layers]
        self._leave_files()
        weight = model.lm_head.weight
        self._device = weight.device
        self._dtype = weight.dtype
        self._norm = _norm_of(model.model.norm)
        self._cos = self._sin = torch.empty(0, self._size, device=self._device)
        self._starts = np.zeros(capacity, np.int64)  # first column of each row
        self._column = 0  # next to write
        self._most = 0  # columns that the rows can ever need
        self._masked = False  # whether some row starts later than column 0
        self._cache_rows = 0  # most that ran at once, and some more
        self._cache = self._new_cache(0)

    @torch.no_grad()
    def _leave_files(self) -> None:
        """Copies what is not fused, so that no weight on the CPU lies in the model's files.

        transformers maps these files. While one tensor lies in a mapping, the process holds all of
        its pages, also those of matrices that were fused.
        """
        fused = {
            matrix.untyped_storage().data_ptr()
            for layer in self._layers
            for matrix in (layer.qkv, layer.qkv_bias, layer.gate_up)
            if matrix is not None
        }
        for parameter in self._model.parameters():
            memory = parameter.untyped_storage().data_ptr()
            if parameter.device.type == "cpu" and memory not in fused:
                parameter.data = parameter.data.clone()

    def _new_cache(self, columns: int) -> Tensor:
        """Returns a cache [layers, 2, its rows, K, columns, E]: keys, then values.

        Beginnings that take more than it adds give way before it is made.
        """
        layers = len(self._model.model.layers)
        shape = (layers, 2, self._cache_rows, self._kv_heads, columns, self._size)
        more = math.prod(shape) * self._dtype.itemsize - self._cache.nbytes
        self._kept.shrink(max(more, PARKED_BYTES))
        # zeros, because a masked column still takes part in products, and 0 * nan is nan
        return torch.zeros(shape, device=self._device, dtype=self._dtype)

    def _lay(self, shift: int, columns: int) -> None:
        """Moves the cached columns by ``shift`` and makes room for ``columns`` in all.

        A negative shift drops that many columns on the left, which no row uses.
        """
        first = max(0, -shift)
        last = self._column
        target = slice(first + shift, last + shift)
        there = self._cache.shape[4]
        if columns > there or self._cache_rows > self._cache.shape[2]:
            former = self._cache if self.rows else None
            self._cache = torch.empty(0)  # where no row runs, this frees the former one first
            self._cache = self._new_cache(
                columns_on_cpu(columns, self._most) if columns > there else there
            )
            if former is not None:
                live = former[:, :, : self.rows, :, first:last]
                self._cache[:, :, : self.rows, :, target] = live
        elif shift:
            live = self._cache[:, :, : self.rows, :, first:last].clone()
            self._cache[:, :, : self.rows, :, target] = live
        self._column += shift
        self._starts[: self.rows] += shift
        self._make_tables(columns)

    def _rows_for(self, rows: int) -> int:
        """Returns how many rows the cache gets where so many run: half more than it has."""
        if rows <= self._cache_rows:
            return self._cache_rows
        return min(self._capacity, max(rows, self._cache_rows * 3 // 2))

    def _make_tables(self, columns: int) -> None:
        """Makes the tables of the rotary embedding longer where they are too short."""
        if columns <= len(self._cos):
            return
        positions = torch.arange(2 * columns, device=self._device)[None]
        cos, sin = self._model.model.rotary_emb(self._cos[None], positions)
        half = self._size // 2
        # sin has its sign included: rotated x = x * cos + (x with its halves swapped) * sin
        self._cos = cos[0]
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)

    @torch.no_grad()
    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        repeats: Sequence[int],
        images: Sequence[Images | None] = (),
    ) -> Tensor:
        """See ``Decoder.prefill``. Raises ValueError when more than ``capacity`` rows would run."""
        if self.rows + sum(repeats) > self._capacity:
            raise ValueError(
                f"{self.rows} + {sum(repeats)} rows exceed the capacity of {self._capacity}"
            )
        self._cache_rows = max(self._cache_rows, self._rows_for(self.rows + sum(repeats)))
        if not self.rows:
            self._column = 0
        # A prompt longer than the next column pushes the other rows to the right. When more
        # than half of the columns are left of every row's start, those are dropped.
        unused = int(self._starts[: self.rows].min(initial=self._column))
        shift = max(
            max(map(len, prompts)) - self._column, -unused if unused > self._column // 2 else 0
        )
        self._most = self._column + shift + self._actions
        self._lay(shift, self._column + shift + 1)
        begun = self._begun(prompts)
        unread = [len(p) - _length(one) for p, one in zip(prompts, begun, strict=True)]
        self.read_tokens += sum(unread)
        self.kept_tokens += sum(map(_length, begun))
        # neighbouring prompts go through the model together, up to the limit on padded tokens
        logits = []
        start = 0
        while start < len(prompts):
            stop = start + 1
            while stop < len(prompts) and _fit_together(unread[start : stop + 1], begun):
                stop += 1
            part = slice(start, stop)
            logits.append(self._prefill(prompts[part], repeats[part], begun[part]))
            start = stop
        self._masked = bool(self._starts[: self.rows].any())
        return torch.cat(logits)

    def _prefill(
        self,
        prompts: Sequence[np.ndarray],
        repeats: Sequence[int],
        begun: Sequence[Tensor | None],
    ) -> Tensor:
        """Reads prompts, padded on the left to one width, in one forward pass; see ``prefill``.

        begun: of each, keys and values [layers, 2, K, S, E] of its first S tokens, which are not
            read again.
        """
        skipped = np.array([_length(one) for one in begun])
        lengths = np.array([len(p) for p in prompts]) - skipped
        width = int(lengths.max())
        ids = np.zeros((len(prompts), width), np.int64)
        for i, prompt in enumerate(prompts):
            ids[i, width - lengths[i] :] = prompt[skipped[i] :]
        expand = np.repeat(np.arange(len(prompts)), repeats)
        fresh = slice(self.rows, self.rows + len(expand))
        columns = slice(self._column - width, self._column)
        source = torch.from_numpy(expand).to(self._device)

        def keep(layer: int, keys: Tensor, values: Tensor) -> None:
            self._cache[layer, 0, fresh, :, columns] = keys.index_select(0, source)
            self._cache[layer, 1, fresh, :, columns] = values.index_select(0, source)

        x = self._read(ids, lengths, begun, keep)
        row = self.rows
        for pairs, length, repeated in zip(begun, lengths.tolist(), repeats, strict=True):
            if pairs is not None:  # it stands right before what was read of each row
                end = self._column - length
                place = slice(end - pairs.shape[3], end)
                self._cache[:, :, row : row + repeated, :, place] = pairs[:, :, None]
            row += repeated
        self._starts[fresh] = self._column - (lengths + skipped)[expand]
        self.rows += len(expand)
        return self._logits(x[:, -1]).index_select(0, source)

    def _read(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        begun: Sequence[Tensor | None],
        keep: Callable[[int, Tensor, Tensor], None],
    ) -> Tensor:
        """Runs the layers over tokens int64[N, W]; returns their outputs [N, W, D].

        lengths: int64[N], how many tokens of each line are real: the last ones.
        begun: of each line, keys and values [layers, 2, K, S, E] of S tokens before it.
        keep: is given the number of each layer, and its keys and values [N, K, W, E].
        """
        lines, width = ids.shape
        skipped = np.array([_length(one) for one in begun])
        places = np.maximum(np.arange(width) - (width - lengths[:, None]), 0) + skipped[:, None]
        cos, sin = self._angles(places.reshape(-1))
        x = self._model.model.embed_tokens(torch.from_numpy(ids.reshape(-1)).to(self._device))
        mask = self._prefill_mask(width, lengths, skipped)
        heads = [self._query_heads, 2 * self._kv_heads]
        for number, layer in enumerate(self._layers):
            turned = (
                self._project(layer, x, cos, sin).view(lines, width, -1, self._size).transpose(1, 2)
            )
            q, pairs = turned.split(heads, 1)
            keep(number, *pairs.chunk(2, 1))
            k, v = _behind(begun, number, pairs).chunk(2, 1)
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, enable_gqa=True
            )
            x = layer.finish(x, out.transpose(1, 2).reshape(len(x), -1))
        return x.view(lines, width, -1)

    def _prefill_mask(self, width: int, lengths: np.ndarray, skipped: np.ndarray) -> Tensor | None:
        """Returns the mask bool[N, 1, W, S + W] of lines that are padded on the left.

        True where a token sees another. None when nothing is padded or skipped: attention is then
        causal.

        skipped: int64[N], tokens before each line: the last ones of S.
        """
        if (lengths == width).all() and not skipped.any():
            return None
        real = np.arange(width) >= width - lengths[:, None]
        visible = np.tri(width, dtype=bool) & real[:, None, :]
        # a padded token sees itself, so that its softmax is not nan
        visible |= np.eye(width, dtype=bool)
        most = int(skipped.max())
        before = np.arange(most) >= most - skipped[:, None]
        before = np.broadcast_to(before[:, None], (len(lengths), width, most))
        return torch.from_numpy(np.concatenate([before, visible], 2)[:, None]).to(self._device)

    def _begun(self, prompts: Sequence[np.ndarray]) -> list[Tensor | None]:
        """Returns for each prompt keys and values [layers, 2, K, S, E] of S tokens that it begins
        with, or None.

        They are of a row that was parked, or of what prompts have in common: a judge's question,
        for example, or the system message of a chat.
        """
        if not self._may_keep:
            return [None] * len(prompts)
        found = [self._kept.longest(prompt) for prompt in prompts]
        new = [i for i, (_, same) in enumerate(found) if same < len(prompts[i]) // 2]
        if new:
            known = min(found[i][1] for i in new)
            common = self._read_common([prompts[i] for i in new], known)
            for i in new:
                if common is not None and found[i][1] < len(common.ids):
                    found[i] = common, len(common.ids)
        begun: list[Tensor | None] = []
        views: dict[tuple[int, int], Tensor] = {}
        for one, same in found:
            if one is None or same < _KEPT_LEAST:
                begun.append(None)
                continue
            self._kept.use(one)
            begun.append(views.setdefault((id(one), same), one.held[:, :, :, :same]))
        return begun

    def _read_common(self, prompts: Sequence[np.ndarray], known: int) -> Beginning[Tensor] | None:
        """Reads and keeps the tokens with which all prompts begin.

        They are also the beginning of the prompt before, if there was one. They are read once,
        because the prompts of the next call may begin alike.
        None: fewer than 16 tokens are the same, or half of them are known of each prompt.

        known: how many tokens of each are kept already.
        """
        alike = [*prompts] if self._latest is None else [*prompts, self._latest]
        self._latest = prompts[0]
        if len(alike) == 1:
            return None  # there is nothing to compare this prompt with
        # At least one token of each prompt is read, because its logits are needed.
        same = min(common_length(*alike), min(map(len, prompts)) - 1)
        if same < _KEPT_LEAST or known >= max(_KEPT_LEAST, same // 2):
            return None
        ids = prompts[0][:same]
        shape = (len(self._layers), 2, self._kv_heads, same, self._size)
        kept = torch.empty(shape, device=self._device, dtype=self._dtype)

        def keep(layer: int, keys: Tensor, values: Tensor) -> None:
            kept[layer, 0], kept[layer, 1] = keys[0], values[0]

        self._read(ids[None].astype(np.int64), np.array([same]), [None], keep)
        self.read_tokens += same
        one = Beginning(ids, kept, kept.nbytes)
        self._keep(one)
        return one

    def unread(self, prompt: np.ndarray) -> int:
        """See ``KeepingDecoder.unread``. What prompts have in common is not looked for."""
        same = self._kept.longest(prompt)[1]
        return len(prompt) - (same if same >= _KEPT_LEAST else 0)

    def park(self, row: int, ids: np.ndarray, experts: Sequence[np.ndarray] = ()) -> None:
        """See ``KeepingDecoder.park``."""
        if not self._may_keep:
            return
        pairs = self._cache[:, :, row, :, int(self._starts[row]) : self._column].clone()
        self._keep(Beginning(ids, pairs, pairs.nbytes))

    def _keep(self, one: Beginning[Tensor]) -> None:
        self._kept.add(one, max(self._cache.nbytes, PARKED_BYTES))

    def _forget_beginnings(self) -> None:
        """Drops what was kept of earlier prompts: other weights would read it differently."""
        self._latest = None
        self._kept.clear()

    def _angles(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, each [n, 1, E], of n positions."""
        at = torch.from_numpy(positions).to(self._device)
        return self._cos.index_select(0, at)[:, None], self._sin.index_select(0, at)[:, None]

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Tensor:
        """See ``Decoder.advance``."""
        rows = self.rows
        column = self._column
        self._lay(0, column + 1)
        starts = self._starts[:rows]
        cos, sin = self._angles(column - starts)
        bias = None
        if self._masked:
            visible = torch.from_numpy(np.arange(column + 1) >= starts[:, None]).to(self._device)
            bias = torch.zeros(visible.shape, device=self._device, dtype=self._dtype).masked_fill_(
                ~visible, -torch.inf
            )
            bias = bias[:, None, None]
        x = F.embedding(tokens, self._model.model.embed_tokens.weight)
        heads = self._query_heads
        fresh = self._cache[:, :, :rows, :, column]
        seen = self._cache[:, :, :rows, :, : column + 1]
        for layer, target, (keys, values) in zip(self._layers, fresh, seen, strict=True):
            turned = self._project(layer, x, cos, sin)
            target.copy_(
                turned[:, heads:].view(rows, 2, self._kv_heads, self._size).transpose(0, 1)
            )
            # the query heads of one key-value head are as many queries of it
            queries = turned[:, :heads].unflatten(1, (self._kv_heads, -1))
            attended = F.scaled_dot_product_attention(queries, keys, values, bias)
            x = layer.finish(x, attended.reshape(rows, -1))
        self._column += 1
        return self._logits(x)

    def drop(self, removed: np.ndarray) -> np.ndarray:
        """See ``Decoder.drop``. The last rows that stay move into the gaps."""
        # No more rows are copied than go: those that stay and lie behind the new end fill the gaps.
        stay = int(len(removed) - removed.sum())
        order = np.arange(stay)
        gaps = removed[:stay].nonzero()[0]
        if len(gaps):
            moved = stay + (~removed[stay:]).nonzero()[0]
            order[gaps] = moved
            to, source = (torch.from_numpy(i).to(self._device) for i in (gaps, moved))
            live = self._cache[..., : self._column, :]
            live[:, :, to] = live[:, :, source]
            self._starts[gaps] = self._starts[moved]
        self.rows = stay
        return order

    def clear(self) -> None:
        self.rows = self._column = 0
        self._forget_beginnings()

    @property
    def cache_bytes(self) -> int:
        return int(self._cache.nbytes) + self._kept.nbytes

    def release(self, *, weights: bool) -> None:
        self._cache = self._new_cache(0)
        self._forget_beginnings()
        if weights:
            self._layers = []

    @torch.no_grad()
    def differing(self) -> list[str]:
        """Returns what this decoder has derived and is not what the model gives now.

        Fused matrices are compared bit for bit, tables of the rotary embedding within rounding.
        """
        wrong: list[str] = []
        for number, (own, layer) in enumerate(
            zip(self._layers, self._model.model.layers, strict=False)
        ):
            attention = layer.self_attn
            parts = {
                "qkv": (own.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]),
                "gate_up": (own.gate_up, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            }
            for name, (fused, modules) in parts.items():
                start = 0
                for module in modules:
                    part = fused[start : start + len(module.weight)]
                    start += len(module.weight)
                    if not torch.equal(part, module.weight):
                        wrong.append(f"the fused matrix {name} of layer {number}")
                        break
        wrong += self.differing_tables()
        return wrong

    @torch.no_grad()
    def differing_tables(self) -> list[str]:
        """Returns the tables of the rotary embedding that are not the model's own.

        It costs one row of angles for each cached position.
        """
        length = len(self._cos)
        rotary = self._model.model.rotary_emb
        if not length or getattr(rotary, "rope_type", "default") in GROWING_ROPES:
            return []
        positions = np.arange(length)
        expected = rotary(self._cos[None], torch.from_numpy(positions)[None].to(self._device))
        half = self._size // 2
        cos, sin = self._angles(positions)
        signed = torch.cat([-expected[1][0, :, :half], expected[1][0, :, half:]], -1)
        gap = max(
            float((cos[:, 0].float() - expected[0][0].float()).abs().max()),
            float((sin[:, 0].float() - signed.float()).abs().max()),
        )
        if gap <= _SAME_TABLE:
            return []
        return [f"tables of the rotary embedding that are {gap:.2g} off"]

    def take_weights(self) -> None:
        self._forget_beginnings()
        if not self._layers:
            self._layers = [
                _FusedLayer(layer, self._products) for layer in self._model.model.layers
            ]

    def _project(self, layer: _FusedLayer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Projects x [n, D] to rotated queries, rotated keys and values, [n, H + 2K, E]."""
        projected = self._products(layer.norm_in(x), layer.qkv, layer.qkv_bias).view(
            len(x), -1, self._size
        )
        turning = projected[:, : self._query_heads + self._kv_heads]
        if layer.norm_q is not None and layer.norm_k is not None:
            turning[:, : self._query_heads] = layer.norm_q(turning[:, : self._query_heads])
            turning[:, self._query_heads :] = layer.norm_k(turning[:, self._query_heads :])
        half = self._size // 2
        swapped = torch.cat([turning[..., half:], turning[..., :half]], -1).mul_(sin)
        turning.mul_(cos).add_(swapped)
        return projected

    def _logits(self, x: Tensor) -> Tensor:
        """Returns the logits [n, V] of hidden states x [n, D]."""
        return self._products(self._norm(x), self._model.lm_head.weight)


def _length(begun: Tensor | None) -> int:
    """Returns of how many tokens [layers, 2, K, S, E] holds keys and values."""
    return 0 if begun is None else begun.shape[3]


def _fit_together(unread: Sequence[int], begun: Sequence[Tensor | None]) -> bool:
    """Whether prompts are read in one pass.

    Beside the few tokens of a turn, a prompt that begins anew would be mostly padding of theirs.

    unread: how many tokens are read of each.
    begun: of all prompts that are read now, keys and values of their beginnings.
    """
    widest = max(unread)
    if len(unread) * widest > _PREFILL_TOKENS:
        return False
    return all(one is None for one in begun) or widest <= 2 * min(unread) + _KEPT_LEAST


def _behind(begun: Sequence[Tensor | None], layer: int, pairs: Tensor) -> Tensor:
    """Puts beginnings before the keys and values of lines; returns [N, 2 K, S + W, E].

    begun: of each line, as in ``FusedDecoder._read``.
    pairs: [N, 2 K, W, E], keys and then values.
    """
    most = max(map(_length, begun))
    if not most:
        return pairs
    lines, heads, width, size = pairs.shape
    # zeros, because a masked column still takes part in products, and 0 * nan is nan
    seen = pairs.new_zeros(lines, heads, most + width, size)
    seen[:, :, most:] = pairs
    of_lines: dict[int, list[int]] = {}
    for line, one in enumerate(begun):
        of_lines.setdefault(id(one), []).append(line)
    for at in of_lines.values():
        one = begun[at[0]]
        if one is not None:
            seen[at, :, most - one.shape[3] : most] = one[layer].flatten(0, 1)
    return seen


def _norm_of(module: Any) -> Callable[[Tensor], Tensor]:
    """Returns the RMS norm (Zhang and Sennrich, 2019) with the weight of a module of
    transformers.
    """
    eps = module.variance_epsilon
    eps_on_cpu = torch.tensor(eps)

    def norm(x: Tensor) -> Tensor:
        weight = module.weight
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps)
        # five calls, where torch's own form makes ten on a CPU
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = torch.addcmul(eps_on_cpu, length, length, value=1 / x.shape[-1])
        return (x * mean.rsqrt_()).mul_(weight)

    return norm


class LayerTensors(NamedTuple):
    """The weights of one layer; matrices [outputs, inputs], norms [D] or [E].

    eps: of all norms.
    qkv: queries, keys and values, one below the other. gate_up: likewise.
    norm_q, norm_k: None for families that do not have them.
    """

    norm_in: Tensor
    eps: float
    qkv: Tensor
    qkv_bias: Tensor | None
    norm_q: Tensor | None
    norm_k: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    norm_out: Tensor
    gate_up: Tensor
    down: Tensor


class _FusedLayer:
    """The weights of one layer, as ``FusedDecoder`` uses them.

    layer: a decoder layer of transformers, whose projections become views of the fused matrices.
    products: the form of products with weights.
    """

    def __init__(self, layer: Any, products: Products) -> None:
        self._layer = layer
        self._products = products
        attention = layer.self_attn
        mlp = layer.mlp
        self.qkv, self.qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, _ = _fuse([mlp.gate_proj, mlp.up_proj])
        self.output = attention.o_proj
        self.down = mlp.down_proj
        self.norm_in = _norm_of(layer.input_layernorm)
        self.norm_out = _norm_of(layer.post_attention_layernorm)
        normed = hasattr(attention, "q_norm")
        self.norm_q = _norm_of(attention.q_norm) if normed else None
        self.norm_k = _norm_of(attention.k_norm) if normed else None

    def tensors(self) -> LayerTensors:
        """Returns the weights as they lie in memory now."""
        attention, mlp = self._layer.self_attn, self._layer.mlp
        norm_in = self._layer.input_layernorm
        normed = hasattr(attention, "q_norm")
        return LayerTensors(
            norm_in=norm_in.weight,
            eps=float(norm_in.variance_epsilon),
            qkv=self.qkv,
            qkv_bias=self.qkv_bias,
            norm_q=attention.q_norm.weight if normed else None,
            norm_k=attention.k_norm.weight if normed else None,
            output=attention.o_proj.weight,
            output_bias=attention.o_proj.bias,
            norm_out=self._layer.post_attention_layernorm.weight,
            gate_up=self.gate_up,
            down=mlp.down_proj.weight,
        )

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Does the rest of a layer after its attention; returns [n, D].

        x: [n, D], the layer's input.
        attended: [n, H E], outputs of the attention.
        """
        product, output = self._products, self.output
        x = x + product(attended, output.weight, output.bias)
        gate, up = product(self.norm_out(x), self.gate_up).chunk(2, -1)
        return x + product(F.silu(gate).mul_(up), self.down.weight)


@torch.no_grad()
def _fuse(modules: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Stacks the weights, and the biases if there are any, of linear modules with one input.

    Returns weight [sum of outputs, D] and bias or None. The modules' own become views of them.
    """
    fused: list[Tensor | None] = []
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in modules]
        if parts[0] is None:
            fused.append(None)
            continue
        fused_tensor = torch.cat(parts)
        for part, view in zip(parts, fused_tensor.split([len(p) for p in parts]), strict=True):
            part.data = view
        fused.append(fused_tensor)
    return fused[0], fused[1]


@dataclass
class _Part:
    """Rows of one length.

    rows: how many.
    cache: of transformers.
    shift: int64[rows], only for an image-text model: the position of a row's next token less the
        number of its cached tokens, since images take fewer positions than tokens.
    """

    rows: int
    cache: Any
    shift: Tensor | None = None

    def take(self, indexes: Tensor) -> None:
        """Keeps the rows ``indexes``, int64, in that order; a row may be repeated."""
        self.rows = len(indexes)
        self.cache.reorder_cache(indexes)
        if self.shift is not None:
            self.shift = self.shift.index_select(0, indexes)


class _Parked(NamedTuple):
    """What is kept of a row that has ended.

    length: its tokens.
    cache: of transformers, with this row alone.
    shift: as of a ``_Part``, int64[1].
    experts: pieces [t, L, k] of the experts of its tokens.
    """

    length: int
    cache: Any
    shift: Tensor | None
    experts: Sequence[np.ndarray]


class TransformersDecoder:
    """A decoder over the model's own forward pass and cache.

    Neighbours whose prompts have the same length run together. So there is no padding and no mask,
    and any causal language model gives right results; but prompts of many lengths make many small
    batches. With a sliding window a prompt goes on only from all that a parked row has read, since
    the window has lost what was before. Rows with other states than keys and values are not parked:
    transformers' forward passes go on from such states by one token alone.

    routers: of a mixture of experts, once the generator has set them.
    routed: of the latest call, for each row that it read uint8 or uint16 [T, L, k]: the experts of
        the T tokens that it read, behind those of the parked row that it went on from. Empty
        without routers.

    products: the form of products with weights.
    capacity: most rows that are parked.
    may_keep: whether rows may be parked.
    """

    def __init__(
        self, model: Any, products: Products, capacity: int = 0, may_keep: bool = True
    ) -> None:
        products.install(model)
        self._products = products
        self.rows = self.read_tokens = self.kept_tokens = 0
        self.routers: Routers | None = None
        self.routed: list[np.ndarray] = []
        self._model = model
        self._parts: list[_Part] = []
        self._may_keep = may_keep
        self._kept: Beginnings[_Parked] = Beginnings(capacity)
        self._most = 0  # bytes that the cache has taken at a time

    @torch.no_grad()
    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        repeats: Sequence[int],
        images: Sequence[Images | None] = (),
    ) -> Tensor:
        """See ``Decoder.prefill``. Neighbouring prompts of one length are read together."""
        shown = images or [None] * len(prompts)
        begun = [self._begun(*one) for one in zip(prompts, shown, strict=True)]
        skipped = [0 if one is None else one.length for one in begun]
        sizes = [(len(p), known) for p, known in zip(prompts, skipped, strict=True)]
        self.kept_tokens += sum(skipped)
        self.read_tokens += sum(total - known for total, known in sizes)
        logits: list[Tensor] = []
        routed: list[np.ndarray] = []
        start = 0
        while start < len(sizes):
            alike = takewhile(sizes[start].__eq__, sizes[start:])
            part = slice(start, start + sum(1 for _ in alike))
            logits.append(self._prefill(prompts[part], repeats[part], shown[part], begun[part]))
            routed += self.routed
            start = part.stop
        self.routed = routed
        return torch.cat(logits)

    def _prefill(
        self,
        prompts: Sequence[np.ndarray],
        repeats: Sequence[int],
        images: Sequence[Images | None],
        begun: Sequence[_Parked | None],
    ) -> Tensor:
        """Reads prompts that are of one length, as are their beginnings; see ``prefill``."""
        device = self._model.device
        parked = [one for one in begun if one is not None]
        skipped = parked[0].length if parked else 0
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64)[:, skipped:]).to(device)
        expand = torch.repeat_interleave(
            torch.arange(len(prompts)), torch.tensor(list(repeats))
        ).to(device)
        self._begin()
        with self._products.decoding():
            if parked:
                part = _resumed(parked)
                logits = self._feed(part, ids)
            else:
                logits, part = self._read(ids, images)
        routed = self._routed(*ids.shape)
        if routed and parked and parked[0].experts:  # else no record is to name them
            routed = [
                np.concatenate([np.concatenate(one.experts)[:skipped], experts])
                for one, experts in zip(parked, routed, strict=True)
            ]
        self.routed = [routed[row] for row in expand.tolist()] if routed else []
        part.take(expand)
        self._parts.append(part)
        self.rows += len(expand)
        return logits.index_select(0, expand)

    def _begun(self, prompt: np.ndarray, images: Images | None) -> _Parked | None:
        """Returns what a prompt goes on from: of a parked row what the prompt begins with."""
        one, same = self._fitting(prompt)
        if one is None or images is not None:
            return None
        self._kept.use(one)
        cache = _with_layers(one.held.cache, lambda layers: layers[0][:, :, :same])
        return one.held._replace(length=same, cache=cache)

    def _fitting(self, prompt: np.ndarray) -> tuple[Beginning[_Parked] | None, int]:
        """Returns a parked row, and how many of its tokens a prompt begins with.

        Where the prompt begins with a part of the row, this is to be half of the prompt: what is
        cut at many lengths makes many small batches.
        """
        one, same = self._kept.longest(prompt)
        if one is None or same < len(one.ids):
            has_window = one is not None and any(one.is_sliding for one in one.held.cache.layers)
            if has_window or same < max(_KEPT_LEAST, len(prompt) // 2):
                return None, 0
        return one, same

    def unread(self, prompt: np.ndarray) -> int:
        """See ``KeepingDecoder.unread``."""
        return len(prompt) - self._fitting(prompt)[1]

    def park(self, row: int, ids: np.ndarray, experts: Sequence[np.ndarray] = ()) -> None:
        """See ``KeepingDecoder.park``."""
        if not self._may_keep:
            return
        for part in self._parts:
            if row < part.rows:
                break
            row -= part.rows
        if not _has_keys_alone(part.cache):
            return
        at = slice(row, row + 1)
        cache = _with_layers(part.cache, lambda layers: layers[0][at].clone())
        shift = None if part.shift is None else part.shift[at]
        self._most = max(self._most, _nbytes(one.cache for one in self._parts))
        held = _Parked(len(ids), cache, shift, experts)
        self._kept.add(Beginning(ids, held, _nbytes([cache])), max(self._most, PARKED_BYTES))

    def _read(self, ids: Tensor, images: Sequence[Images | None]) -> tuple[Tensor, _Part]:
        """Reads prompts ids int64[R, P]; returns logits [R, V] of what follows, and the rows."""
        out = self._model(input_ids=ids, use_cache=True)
        return out.logits[:, -1], _Part(len(ids), out.past_key_values)

    def _feed(self, part: _Part, tokens: Tensor) -> Tensor:
        """Appends tokens int64[rows, n]; returns the logits [rows, V] of what follows."""
        logits: Tensor = self._model(
            input_ids=tokens, past_key_values=part.cache, use_cache=True
        ).logits
        return logits[:, -1]

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Tensor:
        logits = []
        routed: list[np.ndarray] = []
        start = 0
        for part in self._parts:
            self._begin()
            with self._products.decoding():
                logits.append(self._feed(part, tokens[start : start + part.rows, None]))
            routed += self._routed(part.rows, 1)
            start += part.rows
        self.routed = routed
        return torch.cat(logits)

    def _begin(self) -> None:
        """Has routers choose for themselves in the next forward pass."""
        if self.routers is not None:
            self.routers.begin(None)

    def _routed(self, rows: int, width: int) -> list[np.ndarray]:
        """Returns the experts [width, L, k] of each row of the latest forward pass."""
        if self.routers is None:
            return []
        experts = small(self.routers.own(), self.routers.experts)
        self.routers.forget()
        return list(experts.reshape(rows, width, *experts.shape[1:]))

    def drop(self, removed: np.ndarray) -> np.ndarray:
        """See ``Decoder.drop``. The rows that stay keep their order."""
        parts = []
        start = 0
        for part in self._parts:
            keep = (~removed[start : start + part.rows]).nonzero()[0]
            start += part.rows
            if 0 < len(keep) < part.rows:
                part.take(torch.from_numpy(keep).to(self._model.device))
            if len(keep):
                parts.append(part)
        self._parts = parts
        self.rows = sum(part.rows for part in parts)
        return (~removed).nonzero()[0]

    def clear(self) -> None:
        self._parts = []
        self.rows = 0
        self._kept.clear()

    @property
    def cache_bytes(self) -> int:
        return _nbytes(part.cache for part in self._parts) + self._kept.nbytes

    def release(self, *, weights: bool) -> None:
        self._parts = []
        self._most = 0
        self._kept.clear()

    def take_weights(self) -> None:
        self._kept.clear()


class ImageTextDecoder(TransformersDecoder):
    """A decoder for prompts with images.

    It counts positions itself, because the model remembers only those of the latest prompts.
    """

    def _read(self, ids: Tensor, images: Sequence[Images | None]) -> tuple[Tensor, _Part]:
        """Reads prompts and the images that they show; see ``TransformersDecoder._read``."""
        embeddings, positions, shift = show(self._model, ids, images or [None] * len(ids))
        out = self._model.base_model.language_model(
            inputs_embeds=embeddings, position_ids=positions, use_cache=True
        )
        return self._logits(out), _Part(len(ids), out.past_key_values, shift)

    def _feed(self, part: _Part, tokens: Tensor) -> Tensor:
        """Appends tokens at positions that are counted here; see ``TransformersDecoder._feed``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        places += part.cache.get_seq_length()
        assert part.shift is not None  # ``_read`` gives it
        positions = (part.shift[:, None] + places)[None].expand(3, -1, -1)
        text = self._model.base_model.language_model
        return self._logits(
            text(tokens, position_ids=positions, past_key_values=part.cache, use_cache=True)
        )

    def _logits(self, out: Any) -> Tensor:
        """Returns the logits [R, V] of the last token of each row."""
        logits: Tensor = self._model.lm_head(out.last_hidden_state[:, -1])
        return logits


def _has_keys_alone(cache: Any) -> bool:
    """Whether a cache of transformers holds keys and values, and nothing else."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return all(type(one) in (DynamicLayer, DynamicSlidingWindowLayer) for one in cache.layers)


def _resumed(parked: Sequence[_Parked]) -> _Part:
    """Makes running rows of parked ones of the same length."""
    cache = _with_layers(parked[0].cache, torch.cat, [one.cache for one in parked[1:]])
    shifts = [one.shift for one in parked if one.shift is not None]
    return _Part(len(parked), cache, torch.cat(shifts) if shifts else None)


def _with_layers(
    cache: Any, change: Callable[[list[Tensor]], Tensor], others: Sequence[Any] = ()
) -> Any:
    """Returns a copy of a cache, whose keys and values are made of its own and those of others."""
    made = copy.copy(cache)
    made.layers = []
    for number, layer in enumerate(cache.layers):
        alike = [layer, *(one.layers[number] for one in others)]
        new = copy.copy(layer)
        new.keys = change([one.keys for one in alike])
        new.values = change([one.values for one in alike])
        made.layers.append(new)
    return made


def _nbytes(caches: Iterable[Any]) -> int:
    """Returns what keys and values of caches of transformers take."""
    layers = (layer for cache in caches for layer in cache.layers)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


@torch.no_grad()
def make_decoder(
    model: Any,
    choice: str,
    capacity: int,
    tolerance: float,
    products: Products,
    make_fused: Callable[[Any, int, Products], KeepingDecoder] = FusedDecoder,
    may_keep: bool = True,
) -> KeepingDecoder:
    """Returns the decoder of a model.

    choice: "fused", "transformers" or "auto". "auto" takes the fused one if its logits agree with
        the model's own on random tokens. For an image-text model the choice is ignored: there is
        only one decoder.
    capacity: most rows.
    tolerance: largest difference of a logit that counts as agreement.
    products: the form of products with weights.
    make_fused: (model, capacity, products) -> the fused decoder.
    may_keep: whether rows of the others may be parked.
    """
    if takes_images(model.config):
        return ImageTextDecoder(model, products, capacity, may_keep)
    if choice == "transformers" or not (choice == "fused" or family_supported(model.config)):
        return TransformersDecoder(model, products, capacity, may_keep)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 12)
    expected = model(
        input_ids=torch.from_numpy(ids)[None].to(model.device), use_cache=False
    ).logits[0, 8:]
    fused = make_fused(model, max(capacity, 1), products)
    logits = [fused.prefill([ids[:9]], [1])[0]]
    for token in ids[9:]:
        # a copy, since some decoders write the next logits into the same memory
        logits.append(fused.advance(torch.tensor([token], device=model.device))[0].clone())
    fused.clear()
    fused.read_tokens = 0  # of no prompt that anybody asks
    agrees = bool((torch.stack(logits) - expected).abs().max() <= tolerance)
    if agrees or choice == "fused":
        return fused
    products.forget()  # the trial's
    return TransformersDecoder(model, products, capacity, may_keep)
