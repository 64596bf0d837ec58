"""Causal attention over a packed row that a context group shares.

Ranks of a ring member swap tokens for heads, the members' keys and values go around the ring, and
the ranks swap back (Fang and Zhao 2024, "USP: a unified sequence parallelism approach"). Either may
have size 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcore_core.contract.errors import ConfigError
from gcore_language.context.groups import ContextGroups
from gcore_language.context.kernels import Kernel
from gcore_language.context.layout import Layout
from gcore_language.context.ring import Turns, ring_attention
from gcore_language.context.settings import divided_heads
from gcore_language.context.ulysses import spread_heads, to_heads, to_tokens

#: Name in transformers' attention interface.
NAME = "gcore_context"
#: Name of the argument that reaches attention through a model's ``forward``.
ARGUMENT = "gcore_context_row"
#: Arguments of other attentions, by transformers' name, and what they would do.
_REFUSED = {
    "s_aux": "sinks, logits that take part in each softmax",
    "softcap": "a bound on scores",
    "position_bias": "a number added to each score",
}


@dataclass(frozen=True)
class SharedRow:
    """A packed row, as one rank of a context group sees it.

    layout: how the row is split.
    groups: the rank's place.
    kernel: computes stretches.
    """

    layout: Layout
    groups: ContextGroups
    kernel: Kernel

    def turns(self, scale: float) -> Turns:
        """Returns what this rank does around the ring."""
        groups = self.groups
        members = range(groups.ring)
        origins = [(groups.member - step) % groups.ring for step in members]
        return Turns(
            groups,
            self.kernel,
            [self.layout.pairs(groups.member, origin) for origin in origins],
            [self.layout.travelling(member) for member in members],
            scale,
        )


def attend(query: Tensor, key: Tensor, value: Tensor, row: SharedRow, scale: float) -> Tensor:
    """Returns the attention of this rank's tokens, [S, H, E].

    query: [S, H, E], of the tokens ``Layout.own``. key, value: [S, K, E].
    Raises ConfigError when the heads cannot be divided among the ranks of a member.
    """
    ulysses = row.groups.ulysses
    problem = divided_heads(query.shape[1], key.shape[1], ulysses)
    if problem:
        raise ConfigError(problem, where="context.ulysses")
    sizes = row.layout.sizes(row.groups.member)
    group = row.groups.ulysses_group
    spread_key, spread_value = spread_heads(key, ulysses), spread_heads(value, ulysses)
    result = ring_attention(
        to_heads(query, sizes, group),
        to_heads(spread_key, sizes, group),
        to_heads(spread_value, sizes, group),
        row.turns(scale),
    )
    return to_tokens(result, sizes, group)


def register() -> None:
    """Makes this attention known to transformers under ``NAME``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, transformers_attention)


def transformers_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; without a ``SharedRow`` it is transformers' own SDPA.

    query: [1, H, S, E]. key, value: [1, K, S, E]. Returns ([1, S, H, E], None).
    Raises ConfigError for what a shared row cannot have: dropout, a window, sinks or biases.
    """
    row: SharedRow | None = others.pop(ARGUMENT, None)
    if row is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **others
        )
        return plain
    _refuse(row, attention_mask, dropout, sliding_window, others)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    by_token = [x[0].transpose(0, 1) for x in (query, key, value)]
    return attend(by_token[0], by_token[1], by_token[2], row, scale)[None], None


def _refuse(
    row: SharedRow, mask: Tensor | None, dropout: float, window: int | None, others: dict[str, Any]
) -> None:
    strange = [why for name, why in _REFUSED.items() if others.get(name) is not None]
    if dropout:
        strange.append("dropout of attention")
    if window is not None and window < int(row.layout.lengths.max()):
        strange.append(f"a window of {window} tokens, shorter than a record")
    if mask is not None:
        strange.append("a mask of its own")
    if strange:
        raise ConfigError(
            f"this model's attention has {', '.join(strange)}.",
            where="context",
            why="Attention that ranks share is causal within each record, and nothing more.",
            todo="Leave context out for this model.",
        )
