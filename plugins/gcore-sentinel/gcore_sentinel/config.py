"""Defines what may be set under ``sentinel.config``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BandConfig:
    """Settings of ``sentinel: {use: sentinel/band}``."""

    canaries: int = 16
    """Records that generators and trainer score again after a push, where none of a step's records
    could be compared since older weights sampled them; only where both have the trait
    ``scores_logprobs``. 0: none.
    """

    def __post_init__(self) -> None:
        if self.canaries < 0:
            raise ConfigError(f"must be at least 0, not {self.canaries}.", where="canaries")


@dataclass(frozen=True, kw_only=True)
class SequentialConfig(BandConfig):
    """Settings of ``sentinel: {use: sentinel}``."""

    table: str = "auto"
    """File with a table of healthy gaps, as ``g-core sentinel calibrate`` writes it; relative to
    where the run is started. auto: the shipped table of this pair and model, where there is one;
    empty: none, so that only gaps over the band are seen.
    """
    steps_to_false_alarm: float = 1e8
    """On average a healthy run makes at least so many steps before the sequential test stops it;
    above 1.
    """
    keep: bool = False
    """Whether ranks write every compared log-prob to ``sentinel/`` in the run's directory, to make
    a table from.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.steps_to_false_alarm < math.inf:
            raise ConfigError(
                f"must be a finite number above 1, not {self.steps_to_false_alarm:g}.",
                where="steps_to_false_alarm",
            )
