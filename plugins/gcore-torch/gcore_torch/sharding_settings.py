"""What may be set of how a trainer's slots share a model, and what does not go with it.

Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gcore_language.settings import require

from gcore_core.contract.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """How the slots of a trainer share its model; by default each holds its own rows."""

    replicas: int = 1
    """Number of groups into which slots are divided; at least 1, and it must divide ``slots``. Each
    group holds the whole model, its slots share it, and gradients are added up over all groups. The
    gathering of weights then stays within a group, such as one machine.
    """
    tensor: int = 1
    """Number of slots that split every layer; at least 1, and it must divide ``slots`` and the
    model's heads, key-value heads and feed-forward channels. They get the same records, and each
    computes its own heads and channels.
    """

    def __post_init__(self) -> None:
        for name in ("replicas", "tensor"):
            size = getattr(self, name)
            require(size >= 1, f"sharding.{name}", f"must be at least 1, is {size}")
        require(
            self.replicas == 1 or self.tensor == 1,
            "sharding.tensor",
            "does not go with replicas: layers that are split and replicas are not tested together",
        )


def problems_of_slots(sharding: ShardingSettings, slots: int) -> Iterator[tuple[str, str]]:
    """Yields (setting, why) where so many slots cannot be divided as the settings say."""
    if slots % sharding.replicas:
        yield "replicas", f"{slots} slots cannot be divided into {sharding.replicas} replicas"
    if slots % sharding.tensor:
        yield "tensor", f"{slots} slots cannot be divided into groups of {sharding.tensor}"


def problem_of_model(config: Any, tensor: int) -> str:
    """Returns why so many slots cannot split a model's layers; "" where they can.

    config: of a model of transformers.
    """
    if tensor == 1:
        return ""
    heads = int(config.num_attention_heads)
    sizes = {
        "query heads": heads,
        "key-value heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "feed-forward channels": int(config.intermediate_size),
    }
    for what, size in sizes.items():
        if size % tensor:
            return f"{size} {what} cannot be divided among {tensor} slots"
    return ""


def problems(plan: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yields what ``g-core check`` can know of how a trainer's slots share its model.

    plan: the resolved configuration.
    name: of the trainer's role.
    """
    role = plan["roles"][name]
    try:
        sharding = ShardingSettings(**role["config"].get("sharding", {}))
    except (ConfigError, TypeError):
        return  # its own check says so
    where = f"roles.{name}.config.sharding"
    for setting, why in problems_of_slots(sharding, int(role.get("slots", 1))):
        if setting != "tensor":  # of which the core says so: it is the size of a replica
            yield f"{where}.{setting}: {why}; take a number that divides slots."
    problem = _problem_of_files((role.get("model") or {}).get("path"), sharding.tensor)
    if problem:
        yield f"{where}.tensor: {problem}; take a smaller number."
    if not plan.get("run", {}).get("deterministic"):
        return
    for setting in ("replicas", "tensor"):
        if getattr(sharding, setting) > 1:
            yield (
                f"{where}.{setting}: gradients are then added up in an order of their own, so it "
                "does not go with run.deterministic; set it to 1."
            )


def _problem_of_files(path: str | None, tensor: int) -> str:
    """Returns ``problem_of_model`` of a model directory that is there; "" where none is."""
    try:
        config = json.loads((Path(path or "") / "config.json").read_text(encoding="utf-8"))
        return problem_of_model(SimpleNamespace(**config), tensor)
    except (OSError, ValueError, TypeError, AttributeError):
        return ""  # whoever opens the model says so
