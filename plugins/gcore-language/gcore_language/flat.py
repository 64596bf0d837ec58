"""Runs Llama-like models over flat tokens, without padding and with each prompt encoded once.

It is used for short records on a CPU, where transformers' forward spends most of its time on
padding and on small operations. The backward pass is written by hand.

Legend of shapes:

    N   tokens of a batch: all prompts, then all completions
    D   hidden size
    H   query heads
    K   key-value heads
    E   head size
    B   rows of an attention, which are groups or records
    Q   queries of a row
    T   keys of a row
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcore_language.lora import weight_of

#: Kinds of rotary embedding whose angles change as texts get longer, for tokens before as well.
GROWING_ROPES = ("dynamic", "longrope")
#: Products of fewer rows are padded to so many: libraries have other kernels for few rows, which
#: round differently, and then a token's result would depend on how many are beside it.
_LEAST_ROWS = 16

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True, kw_only=True)
class Block:
    """The rows of one attention, and where their queries and keys lie among the tokens.

    A row is a group (prompts to themselves) or a record (a completion to its prompt and itself).
    Rows are padded to the longest one.

    queries: int64[B, Q], token indexes; any valid index where a row is padded.
    keys: int64[B, T], likewise; the last Q of them are the tokens of ``queries``.
    unpadded: int64[n], indexes into the flattened ``queries`` that are not padding.
    bias: float32[B or 1, Q, 1, T], 0 where a query sees a key, else -inf; every query, padding
        included, sees at least one key, so that no softmax is nan.
    is_query: float32[B, Q, 1, 1], 0 for padded queries, else 1; None when none is padded.
    """

    queries: Tensor
    keys: Tensor
    unpadded: Tensor
    bias: Tensor
    is_query: Tensor | None


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """How the flat tokens of a batch of G groups and R records attend to each other.

    positions: int64[N], the position of each token in its record.
    prompts: attention of prompts to themselves, one row for each group.
    completions: attention of completions to their prompt and themselves, one row for each record;
        None when every record has a single action, which is never fed.
    members: float32[G, R], 1 where record r belongs to group g, else 0.
    predicting: int64[M], indexes of the tokens whose last hidden states are returned.
    """

    positions: Tensor
    prompts: Block
    completions: Block | None
    members: Tensor
    predicting: Tensor


def has_window(config: Any) -> bool:
    """Returns whether some layers of a model see only the tokens before them that are near.

    config: of the language model, transformers'.
    """
    if not getattr(config, "use_sliding_window", True):
        return False
    if set(getattr(config, "layer_types", None) or ()) == {"full_attention"}:
        return False
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    return any(size and size < longest for size in sizes)


def family_supported(config: Any) -> bool:
    """Returns whether this module computes the same equations as a Hugging Face config's model.

    False for other families, attention windows, activations other than SiLU, biased MLPs, and
    rotary embeddings that change with the length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        getattr(config, "model_type", "") in FAMILIES
        and not has_window(config)
        and rope.get("rope_type", "default") not in GROWING_ROPES
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
    )


class _RmsNorm(torch.autograd.Function):
    """RMSNorm over the last dimension: x / rms(x) * weight (Zhang and Sennrich 2019, eq. 4).

    It keeps one tensor of x's size for the backward pass, where autograd would keep several.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        normal = x * inverse
        ctx.save_for_backward(normal, inverse, weight)
        return normal * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # with n = x / rms(x): dL/dx = (g * weight - n * mean(g * weight * n)) / rms(x)
        normal, inverse, weight = ctx.saved_tensors
        along = (grad * normal).view(-1, weight.shape[0])
        mean = torch.mv(along, weight).div_(-weight.shape[0]).view(inverse.shape)
        return (grad * weight).addcmul_(normal, mean).mul_(inverse), along.sum(0), None


class _SwiGlu(torch.autograd.Function):
    """SwiGLU: silu(gate) * up (Shazeer 2020, eq. 6).

    ``gate_and_up`` [N, 2 F] holds gate, then up.
    """

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, -1)
        silu = F.silu(gate)
        ctx.save_for_backward(gate_and_up, silu)
        return silu * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_and_up, silu = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, -1)
        grad_both = torch.empty_like(
            gate_and_up
        )  # both halves are written in place: no concatenation
        grad_gate, grad_up = grad_both.chunk(2, -1)
        torch.mul(grad, silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_both


@dataclass(frozen=True, kw_only=True)
class _Gather:
    """Flat indexes that bring one block's heads into batched matrices and back.

    The projections [N, (H + 2K) E] are seen as rows [N (H + 2K), E]: those of one token lie
    together, first its H queries, then its K keys, then its K values.

    queries: rows of the projections, in the order [K, B, Q, H/K].
    keys: rows of the projections, in the order [2, K, B, T]: all keys, then all values.
    outputs: rows of the outputs [N H, E], in the order of ``queries``.
    back_queries: for the block's n own tokens [n, H], places in the order of ``queries``.
    back_keys: for the block's n own tokens [n, 2K], places in the order of ``keys``.
    """

    block: Block
    queries: Tensor
    keys: Tensor
    outputs: Tensor
    back_queries: Tensor
    back_keys: Tensor


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What all layers of one forward pass share.

    turn: complex64[N, 1, E/2], cos + i sin of the rotary angles of each token's position.
    gathers: the block of prompts, then that of completions if there is one.
    members: float32[G, R], see ``FlatLayout``.
    query_heads: H.
    kv_heads: K.
    size: E, the numbers in a head.
    kept: where each layer leaves the keys and values of the block of prompts, [2, K G, T, E] with
        rows in the order [K, G]; None: nowhere.
    """

    turn: Tensor
    gathers: tuple[_Gather, ...]
    members: Tensor
    query_heads: int
    kv_heads: int
    size: int
    kept: list[Tensor] | None = None


def _gather(block: Block, query_heads: int, kv_heads: int) -> _Gather:
    """Makes the indexes of a block.

    Row t (H + 2K) + h of the projections is head h of token t: a query for h < H, else a key, then
    a value. A token's place among a block's own is r Q + q, for query q of row r; in its row of
    keys it is T - Q + q, since the last Q keys are the row's own tokens.
    """
    heads = query_heads + 2 * kv_heads  # rows of a token in the projections
    share = query_heads // kv_heads  # query heads that use one key-value head
    rows, queries = block.queries.shape
    keys = block.keys.shape[1]
    head = torch.arange(query_heads, device=block.keys.device)
    pair = torch.arange(2 * kv_heads, device=block.keys.device)
    row = block.unpadded // queries
    query = block.unpadded % queries
    by_head = head.view(kv_heads, 1, 1, share)
    return _Gather(
        block=block,
        queries=(block.queries[None, :, :, None] * heads + by_head).flatten(),
        keys=(block.keys * heads + query_heads + pair[:, None, None]).flatten(),
        outputs=(block.queries[None, :, :, None] * query_heads + by_head).flatten(),
        back_queries=(
            (head // share * (rows * queries) + block.unpadded[:, None]) * share + head % share
        ).flatten(),
        back_keys=(
            (pair * rows + row[:, None]) * keys + (keys - queries + query)[:, None]
        ).flatten(),
    )


class _Attention(torch.autograd.Function):
    """Rotary embedding, then the softmax attention of each block.

    Projections [N, (H + 2K) E] come in, outputs [N, H E] go out. Queries come scaled, and queries
    and keys come with the two numbers of each rotated pair side by side (see ``_projection``), so
    that the rotation is one complex product (Su et al. 2021, eq. 34).

    Probabilities are kept for the backward pass: rows are short, and for small matrices batched
    products beat a fused attention kernel on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, projected: Tensor, shared: _Pass) -> Tensor:
        # kept of each block: queries q [K B, Q H/K, E], keys and values kv [2, K B, T, E] and
        # probabilities p [K B, Q H/K, T]
        table = _turned(projected, shared.turn, shared).view(-1, shared.size)
        saved = []
        outputs = []
        for gather in shared.gathers:
            block = gather.block
            rows, queries = block.queries.shape
            keys = block.keys.shape[1]
            q = table.index_select(0, gather.queries).view(shared.kv_heads * rows, -1, shared.size)
            kv = table.index_select(0, gather.keys).view(
                2, shared.kv_heads * rows, keys, shared.size
            )
            scores = torch.bmm(q, kv[0].mT).view(shared.kv_heads, rows, queries, -1, keys)
            p = scores.add_(block.bias).softmax(-1)
            if block.is_query is not None:
                p.mul_(block.is_query)  # so that no gradient comes from what is not there
            p = p.view(q.shape[0], -1, keys)
            outputs.append(
                torch.bmm(p, kv[1]).view(-1, shared.size).index_select(0, gather.back_queries)
            )
            saved += [q, kv, p]
            if shared.kept is not None and gather is shared.gathers[0]:
                shared.kept.append(kv)
        ctx.save_for_backward(*saved)
        ctx.shared = shared
        return torch.cat(outputs).view(len(projected), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shared: _Pass = ctx.shared
        saved = ctx.saved_tensors  # once: checkpointing computes them anew at each look
        table = grad.reshape(-1, shared.size)
        parts: list[Tensor] = []
        to_prompts = None
        for i in reversed(
            range(len(shared.gathers))
        ):  # completions first: they reach the prompts' keys and values
            gather = shared.gathers[i]
            q, kv, p = saved[3 * i : 3 * i + 3]
            g = table.index_select(0, gather.outputs).view(q.shape)
            # with s = q k^T, p = softmax(s) and out = p v: the gradients of s, q, k and v
            grad_s = torch._softmax_backward_data(torch.bmm(g, kv[1].mT), p, -1, p.dtype)
            grad_q = (
                torch.bmm(grad_s, kv[0]).view(-1, shared.size).index_select(0, gather.back_queries)
            )
            grad_kv = torch.stack([torch.bmm(grad_s.mT, q), torch.bmm(p.mT, g)])
            # a prompt's keys serve its own queries and those of its completions: both parts add up
            if i:
                to_prompts = _sum_over_members(grad_kv, shared)
            elif to_prompts is not None:
                grad_kv += to_prompts.view(grad_kv.shape)
            own_kv = grad_kv.view(-1, shared.size).index_select(0, gather.back_keys)
            n = len(gather.block.unpadded)
            parts.insert(0, torch.cat([grad_q.view(n, -1), own_kv.view(n, -1)], 1))
        return _turned(torch.cat(parts), shared.turn.conj(), shared), None


def _sum_over_members(grad_kv: Tensor, shared: _Pass) -> Tensor:
    """Sums what completions contribute to the gradient of their prompt's keys and values.

    grad_kv: [2 K R, T, E] or its [2, K R, T, E] form, of the completions' block; the first P of
        the T keys are the prompt's.
    Returns [2K, G, P E].
    """
    prompt = shared.gathers[0].block.keys.shape[1]
    by_record = grad_kv.view(2 * shared.kv_heads, shared.members.shape[1], -1, shared.size)[
        :, :, :prompt
    ]
    return torch.matmul(shared.members, by_record.reshape(*by_record.shape[:2], -1))


def _turned(x: Tensor, turn: Tensor, shared: _Pass) -> Tensor:
    return turned(x, turn, (shared.query_heads + shared.kv_heads) * shared.size, shared.size)


def turned(x: Tensor, turn: Tensor, turning: int, size: int) -> Tensor:
    """Rotates the queries and keys of x [N, (H + 2K) E]; its values stay as they are.

    turn: complex64[N, 1, E/2].
    turning: how many numbers of a row are queries and keys.
    size: E.
    """
    out = torch.empty_like(x)
    shape = (len(x), -1, size // 2, 2)
    source, target = (torch.view_as_complex(t[:, :turning].view(shape)) for t in (x, out))
    torch.mul(source, turn, out=target)
    out[:, turning:] = x[:, turning:]
    return out


def _pairs(weight: Tensor, size: int) -> Tensor:
    """Reorders each head's rows so that the two numbers of a rotated pair are neighbours.

    transformers rotates row j with row j + E/2, so the order becomes 0, E/2, 1, E/2 + 1, ...
    Queries and keys are reordered alike, so their products do not change.
    """
    return weight.view(-1, 2, size // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class LayerWeights:
    """The matrices of a decoder layer, put together so that each input is multiplied once.

    The outputs of ``qkv`` are queries, keys and values. Queries are scaled by E^-1/2; queries and
    keys are in the order of ``_pairs``. With norms of queries and keys (Qwen3) the scale goes into
    the norm's weight, for a norm undoes a scale that comes before it.

    qkv: [(H + 2K) E, D].
    bias: [(H + 2K) E] or None.
    norms: [E], weights of the norms of queries and of keys, or None.
    gate_up: [2 F, D], for F hidden numbers of the MLP.
    """

    qkv: Tensor
    bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    gate_up: Tensor

    @classmethod
    def of(cls, layer: Any, size: int) -> LayerWeights:
        """Puts the weights of a layer of transformers together. size: E."""
        attention = layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        scale = size**-0.5
        normed = hasattr(attention, "q_norm")

        def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat([_pairs(torch.cat([q if normed else q * scale, k]), size), v])

        return cls(
            joined(*map(weight_of, parts)),
            None if parts[0].bias is None else joined(*(part.bias for part in parts)),
            (
                (
                    _pairs(attention.q_norm.weight, size) * scale,
                    _pairs(attention.k_norm.weight, size),
                )
                if normed
                else None
            ),
            torch.cat([weight_of(layer.mlp.gate_proj), weight_of(layer.mlp.up_proj)]),
        )


def project(
    layer: Any, weights: LayerWeights, x: Tensor, query_heads: int, kv_heads: int, size: int
) -> Tensor:
    """Projects a layer's input x [N, D] to queries, keys and values [N, (H + 2K) E]."""
    projected = of_enough_rows(
        lambda rows: F.linear(rows, weights.qkv, weights.bias), norm(layer.input_layernorm, x)
    )
    if weights.norms is None:
        return projected
    q, k, v = projected.view(len(x), -1, size).split([query_heads, kv_heads, kv_heads], 1)
    attention = layer.self_attn
    q = _RmsNorm.apply(q.contiguous(), weights.norms[0], attention.q_norm.variance_epsilon)
    k = _RmsNorm.apply(k.contiguous(), weights.norms[1], attention.k_norm.variance_epsilon)
    return torch.cat([q, k, v], 1).view(len(x), -1)


def finish(layer: Any, weights: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
    """Does the rest of a layer after its attention; returns [N, D].

    x: [N, D], the layer's input.
    attended: [N, H E], outputs of the attention.
    """
    x = x + of_enough_rows(_product(layer.self_attn.o_proj), attended)
    gate_and_up = of_enough_rows(
        lambda rows: F.linear(rows, weights.gate_up), norm(layer.post_attention_layernorm, x)
    )
    return x + of_enough_rows(_product(layer.mlp.down_proj), _SwiGlu.apply(gate_and_up))


def _product(module: Any) -> Callable[[Tensor], Tensor]:
    """Returns the product with a linear layer's weight, adapter included."""
    return lambda rows: F.linear(rows, weight_of(module), module.bias)


def _layer(layer: nn.Module, x: Tensor, shared: _Pass, kept_tokens: Tensor | None) -> Tensor:
    """One decoder layer over flat tokens x [N, D].

    kept_tokens: int64[M], the tokens that go on after the attention; None means all. The last layer
        needs only those that predict an action.
    Returns [M or N, D].
    """
    weights = LayerWeights.of(layer, shared.size)
    projected = project(layer, weights, x, shared.query_heads, shared.kv_heads, shared.size)
    attended = _Attention.apply(projected, shared)
    if kept_tokens is not None:
        x = x.index_select(0, kept_tokens)
        attended = attended.index_select(0, kept_tokens)
    return finish(layer, weights, x, attended)


def of_enough_rows(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns ``product(x)`` as it is for the same rows among many others.

    product: computes each row [D] of its argument [N, D] by itself.
    """
    lacking = _LEAST_ROWS - len(x)
    return product(x) if lacking <= 0 else product(F.pad(x, (0, 0, 0, lacking)))[: len(x)]


def norm(module: Any, x: Tensor) -> Tensor:
    """Returns the RMS norm of x [N, D] with the weight of a module of transformers."""
    return _RmsNorm.apply(x, module.weight, module.variance_epsilon)


def _dispatch(
    layer: nn.Module, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    # a layer's new ``forward``: flat tokens come with a ``_Pass``, all else goes to the old one
    if args and isinstance(args[0], _Pass):
        return _layer(layer, x, *args)
    return original(x, *args, **kwargs)


def install(model: nn.Module) -> None:
    """Lets each decoder layer take flat tokens too.

    They still go through the layer's own ``__call__``, because that is where sharding hooks sit.
    """
    for layer in model.model.layers:
        layer.forward = partial(_dispatch, layer, layer.forward)


def turns(model: Any, positions: Tensor, like: Tensor) -> Tensor:
    """Returns the rotations complex64[N, 1, E/2] of positions int64[N]; see ``turned``.

    like: any tensor with the dtype and on the device of the model's hidden states.
    """
    base = model.model
    cos, sin = base.rotary_emb(like, positions[None])
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, None, :half].float(), sin[0, :, None, :half].float())


def forward(
    model: nn.Module, ids: Tensor, layout: FlatLayout, kept: list[Tensor] | None = None
) -> Tensor:
    """Returns the last hidden states [M, D] of the predicting tokens, after the final norm.

    model: a causal language model on which ``install`` was called.
    ids: int64[N], all prompts, then all completions.
    layout: see ``FlatLayout``; its ``predicting`` has M entries.
    kept: gets the prompts' keys and values of each layer; see ``_Pass``.
    """
    base = model.model
    config = model.config
    x = base.embed_tokens(ids)
    turn = turns(model, layout.positions, x[None])
    heads = (config.num_attention_heads, config.num_key_value_heads)
    blocks = (
        [layout.prompts] if layout.completions is None else [layout.prompts, layout.completions]
    )
    shared = _Pass(
        turn=turn,
        gathers=tuple(_gather(block, *heads) for block in blocks),
        members=layout.members,
        query_heads=heads[0],
        kv_heads=heads[1],
        size=2 * turn.shape[-1],
        kept=kept,
    )
    for layer in base.layers[:-1]:
        x = layer(x, shared, None)
    x = base.layers[-1](x, shared, layout.predicting)
    return norm(base.norm, x)
