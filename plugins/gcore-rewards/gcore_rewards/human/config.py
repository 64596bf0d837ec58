"""What may be set under ``config:`` of the reward ``human``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gcore_core.contract.errors import ConfigError

#: What a job may write to choose the reward.
USES = ("human", "human/default")
#: Where the questions of a run are, in the run's directory.
DIRECTORY = "human"
#: A page with more buttons than digits has no keys for them.
_MOST_LEVELS = 10


@dataclass(frozen=True, kw_only=True)
class HumanConfig:
    """A question about each answer that people are asked, on the page of `g-core human label`."""

    question: str = "Is this a good answer?"
    """Question that stands above the answer."""
    form: Literal["yes_no", "scale"] = "yes_no"
    """yes_no: yes is 1, no is 0. scale: the whole numbers from lowest to highest."""
    lowest: int = 1
    """Worst number of the scale, which becomes 0; the numbers between are spread evenly."""
    highest: int = 5
    """Best number of the scale, which becomes 1."""
    raters: int = 1
    """How many people label each answer; the reward is the mean of their labels."""
    wait_s: float = 86400.0
    """Seconds that an answer waits for its labels; then the reward has failed, without a number.
    rewards.<name>.timeout_s must be longer.
    """
    poll_s: float = 1.0
    """Seconds between two looks at the labels."""
    evaluation: bool = False
    """Ask about the answers of evaluations, too. Otherwise the reward leaves them out."""
    path: str = ""
    """Directory of questions and labels. Empty: human, in the run's directory. Runs that share one
    use each other's labels; relative to the YAML's directory.
    """

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ConfigError("must not be empty.", where="question")
        if not self.lowest < self.highest:
            raise ConfigError(
                f"must be above lowest ({self.lowest}), is {self.highest}.", where="highest"
            )
        if self.highest - self.lowest >= _MOST_LEVELS:
            raise ConfigError(
                f"the scale has {self.highest - self.lowest + 1} numbers, at most {_MOST_LEVELS} "
                "fit.",
                where="highest",
            )
        if self.raters < 1:
            raise ConfigError(f"must be at least 1, is {self.raters}.", where="raters")
        for name in ("wait_s", "poll_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"must be positive, is {getattr(self, name)}.", where=name)
