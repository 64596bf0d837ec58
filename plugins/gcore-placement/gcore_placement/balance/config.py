"""What may be set under ``balance.config``; the string below a field is its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """Settings of every balancer."""

    prompts: Literal["each", "shared"] = "each"
    """Whether the cost of a prompt is shared in its group. each: every record pays for its prompt,
    and records are dealt one by one. shared: for a trainer that encodes the prompt of a group once
    where its records are together; a group stays together and pays once. It is worth it for long
    prompts, where there are many more groups than ranks.
    """


@dataclass(frozen=True, kw_only=True)
class CostConfig(TokensConfig):
    """Settings of balancers that deal by a cost."""

    hidden_size: int = 4096
    """Hidden size of the policy, at least 1. Until something was measured, a record of L tokens
    costs L + L^2 / (12 hidden_size), which is what a transformer's matrices and its causal
    attention multiply.
    """
    learn: bool = True
    """Whether to fit the cost to the seconds that ranks are measured to work. It has no effect in a
    deterministic run.
    """

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise ConfigError(
                f"hidden_size is {self.hidden_size}, and must be positive", where="balance.config"
            )

    def traits(self) -> Traits:
        return Traits(learns_costs=True)
