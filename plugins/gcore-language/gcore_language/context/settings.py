"""What may be set of attention that ranks share, and what does not go with it.

Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gcore_core.contract.errors import ConfigError
from gcore_language.settings import require


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """Slots that share each micro-batch's tokens, for contexts that one slot cannot hold."""

    ulysses: int = 1
    """Number of slots that swap tokens for heads; at least 1. It must divide the model's query
    heads, and it must divide its key-value heads or be a multiple of them.
    """
    ring: int = 1
    """Number of slots, or of groups of ``ulysses`` slots, around which keys and values travel; at
    least 1. Together ``ulysses`` x ``ring`` slots hold one micro-batch.
    """
    whole: Literal["auto", "never"] = "auto"
    """Which records are not cut around the ring: auto leaves those whole that fit one place of it
    while work stays even, by their length and cost; never cuts all.
    """

    def __post_init__(self) -> None:
        for name in ("ulysses", "ring"):
            size = getattr(self, name)
            require(size >= 1, f"context.{name}", f"must be at least 1, is {size}")

    @property
    def degree(self) -> int:
        """How many slots share a micro-batch."""
        return self.ulysses * self.ring


def divided_heads(heads: int, key_heads: int, ulysses: int) -> str:
    """Returns why a model's heads cannot be divided among ``ulysses`` ranks; "" where they can."""
    if heads % ulysses:
        return f"{heads} query heads cannot be divided among {ulysses} slots"
    if key_heads % ulysses and ulysses % key_heads:
        return (
            f"{key_heads} key-value heads can be neither divided among {ulysses} slots nor repeated"
        )
    return ""


def problems(plan: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yields what ``g-core check`` can know of a trainer whose slots share micro-batches.

    It looks at a model directory that is there, and reads its config alone.

    plan: the resolved configuration.
    name: of the trainer's role.
    """
    role = plan["roles"][name]
    config = role["config"]
    try:
        context = ContextSettings(**config.get("context", {}))
    except (ConfigError, TypeError):
        return  # its own check says so
    if context.degree == 1:
        return
    where = f"roles.{name}.config"
    if plan.get("run", {}).get("deterministic"):
        yield (
            f"{where}.context: sums over slots that share a record depend on their number, so it "
            "does not go with run.deterministic; set ulysses and ring to 1."
        )
    problem = _problem_of_heads((role.get("model") or {}).get("path"), context.ulysses)
    if problem:
        yield f"{where}.context.ulysses: {problem}; take more ring and less ulysses."


def _problem_of_heads(path: str | None, ulysses: int) -> str:
    try:
        model = json.loads((Path(path or "") / "config.json").read_text(encoding="utf-8"))
        text = model.get("text_config", model)
        heads = int(text["num_attention_heads"])
        key_heads = int(text.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # whoever opens the model says so
    return divided_heads(heads, key_heads, ulysses)
