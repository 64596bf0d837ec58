"""What may be set of a value head on the policy's own trunk. Light: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gcore_language.settings import require


@dataclass(frozen=True, kw_only=True)
class ValueHeadSettings:
    """A critic that shares the policy's trunk: a value head on its last hidden states."""

    coefficient: float = 0.0
    """What the value loss is multiplied by before it is added to the policy's, at least 0; 0: the
    policy has no value head. 0.1 to 1 is usual.
    """
    clip: float = 0.2
    """How far a value may move in a step until moving it further is not rewarded, at least 0, in
    units of the reward; 0: as far as it likes.
    """
    speed: float = 10.0
    """The head's learning rate over the policy's, above 0. A new head begins with zeros, and says
    little to the trunk until it has grown.
    """
    detach: bool = False
    """Whether the value loss trains the head alone; false: it trains the trunk too."""

    def __post_init__(self) -> None:
        for name in ("coefficient", "clip"):
            value = getattr(self, name)
            require(
                0 <= value < math.inf, f"value_head.{name}", f"must not be negative, is {value}"
            )

        require(0 < self.speed < math.inf, "value_head.speed", f"must be positive, is {self.speed}")

    @property
    def on(self) -> bool:
        """Whether the policy has a value head."""
        return self.coefficient > 0
