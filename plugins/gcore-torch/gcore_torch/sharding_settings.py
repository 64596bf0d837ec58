"""What may be set of how a trainer's slots share a model, and what does not go with it.

Light: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gcore_language.settings import require

from gcore_core.contract.errors import ConfigError

#: Families whose gradients with spread experts have been found to be those of one rank.
FAMILIES_OF_EXPERTS = ("mixtral", "qwen3_moe")


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
    experts: int = 1
    """Number of slots over which the experts of each layer of a mixture of experts are spread; at
    least 1, and it must divide ``slots`` and the model's experts. Each slot has records of its own,
    and sends tokens to the slots that hold their experts.
    """

    def __post_init__(self) -> None:
        for name in ("replicas", "tensor", "experts"):
            size = getattr(self, name)
            require(size >= 1, f"sharding.{name}", f"must be at least 1, is {size}")
        require(
            self.replicas == 1 or self.tensor == 1,
            "sharding.tensor",
            "does not go with replicas: layers that are split and replicas are not tested together",
        )
        require(
            self.experts == 1 or self.replicas == self.tensor == 1,
            "sharding.experts",
            "goes neither with replicas nor with tensor: they are not tested together",
        )


def problems_of_slots(sharding: ShardingSettings, slots: int) -> Iterator[tuple[str, str]]:
    """Yields (setting, why) where so many slots cannot be divided as the settings say."""
    if slots % sharding.replicas:
        yield "replicas", f"{slots} slots cannot be divided into {sharding.replicas} replicas"
    if slots % sharding.tensor:
        yield "tensor", f"{slots} slots cannot be divided into groups of {sharding.tensor}"
    if slots % sharding.experts:
        yield "experts", f"{slots} slots cannot be divided into groups of {sharding.experts}"


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


def problem_of_experts(config: Any, slots: int) -> str:
    """Returns why a model's experts cannot be spread over so many slots; "" where they can.

    config: of a model of transformers.
    """
    if slots == 1:
        return ""
    if config.model_type not in FAMILIES_OF_EXPERTS:
        return (
            f"the experts of a model of the family {config.model_type} cannot be spread; tested "
            f"are {', '.join(FAMILIES_OF_EXPERTS)}"
        )
    count = int(getattr(config, "num_local_experts", None) or config.num_experts)
    if count % slots:
        return f"{count} experts cannot be divided among {slots} slots"
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
    path = (role.get("model") or {}).get("path")
    for setting, problem_of in (("tensor", problem_of_model), ("experts", problem_of_experts)):
        problem = _problem_of_files(path, getattr(sharding, setting), problem_of)
        if problem:
            yield f"{where}.{setting}: {problem}; take a smaller number."
    if not plan.get("run", {}).get("deterministic"):
        return
    for setting in ("replicas", "tensor", "experts"):
        if getattr(sharding, setting) > 1:
            yield (
                f"{where}.{setting}: gradients are then added up in an order of their own, so it "
                "does not go with run.deterministic; set it to 1."
            )


def _problem_of_files(path: str | None, slots: int, problem_of: Callable[[Any, int], str]) -> str:
    """Returns what ``problem_of`` says of a model directory that is there; "" where none is."""
    try:
        config = json.loads((Path(path or "") / "config.json").read_text(encoding="utf-8"))
        return problem_of(SimpleNamespace(**config), slots)
    except (OSError, ValueError, TypeError, AttributeError):
        return ""  # whoever opens the model says so
