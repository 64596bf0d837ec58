"""What can be set under ``config`` of this plugin's objective."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import Traits


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
    """Settings of ``roles.critic.objective.config``."""

    clip: float = 0.2
    """How far a value may move from what it was before the step's first update until moving it
    further is not rewarded; at least 0, in units of the reward. 0 does not clip.
    """

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip < math.inf:
            raise ConfigError(
                f"{self.clip} is no distance",
                where="clip",
                todo="set clip to 0, which does not clip, or to more",
            )

    def traits(self) -> Traits:
        return Traits(requires=frozenset({"values", "old_values", "returns"}))
