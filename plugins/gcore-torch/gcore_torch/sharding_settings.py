"""What may be set of how a trainer's slots share a model, and what does not go with it.

Light: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

    def __post_init__(self) -> None:
        require(
            self.replicas >= 1,
            "sharding.replicas",
            f"must be at least 1, is {self.replicas}",
        )


def problem_of_slots(sharding: ShardingSettings, slots: int) -> str:
    """Returns why so many slots cannot be divided as the settings say; "" where they can."""
    if slots % sharding.replicas:
        return f"{slots} slots cannot be divided into {sharding.replicas} replicas"
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
    problem = problem_of_slots(sharding, int(role.get("slots", 1)))
    if problem:
        yield f"{where}.replicas: {problem}; take a number that divides slots."
    if sharding.replicas > 1 and plan.get("run", {}).get("deterministic"):
        yield (
            f"{where}.replicas: gradients of replicas are added up in an order of their own, so it "
            "does not go with run.deterministic; set it to 1."
        )
