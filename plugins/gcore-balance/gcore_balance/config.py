"""What may be set under ``balance.config``; the string below a field is its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gcore_core.contract.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    prompts: Literal["each", "shared"] = "each"
    """``shared``: the trainer encodes the prompt of a group once where its records are together, so
    they stay together: worth it for long prompts, and when there are many more groups than ranks.
    ``each``: every record for itself.
    """


@dataclass(frozen=True, kw_only=True)
class CostConfig(TokensConfig):
    hidden_size: int = 4096
    """Of the policy. Until something was measured, a record of L tokens costs L + L^2 / (12
    hidden_size): what a transformer's matrices and its causal attention multiply.
    """
    learn: bool = True
    """Fit the cost to the seconds that ranks are measured to work. Has no effect in a deterministic
    run.
    """

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise ConfigError(
                f"hidden_size is {self.hidden_size}, and must be positive", where="balance.config"
            )
