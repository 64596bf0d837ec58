"""What may be set under ``placement.config``.

The string below a field is its help, which ``g-core plugins show placement`` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import Traits


def _require(holds: bool, where: str, what: str) -> None:
    """Raises ConfigError with ``what`` for the setting ``where`` unless it ``holds``."""
    if not holds:
        raise ConfigError(what, where=f"placement.config.{where}")


def _share(settings: Any, name: str) -> None:
    """Raises ConfigError unless the setting ``name`` lies between 0 and 1."""
    value = getattr(settings, name)
    _require(0 < value < 1, name, f"must be between 0 and 1, is {value:g}")


#: Share of the cells that the judges get before anything is measured. Every policy begins with it,
#: so that those which are compared begin alike.
FIRST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Settings of ``placement/split``."""

    share: float = FIRST_SHARE
    """Share of the cells that the judges get, above 0 and below 1; ignored when ``cells`` is set.
    """
    cells: int = 0
    """Number of cells that the judges get, at least 0; 0: ``share`` decides."""

    def __post_init__(self) -> None:
        _share(self, "share")
        _require(self.cells >= 0, "cells", f"must not be negative, is {self.cells}")


@dataclass(frozen=True, kw_only=True)
class UtilisationConfig:
    """Settings of ``placement/utilisation``."""

    cells: int = 1
    """Number of cells that move after a step, at least 1."""
    share: float = FIRST_SHARE
    """Share of the cells that the judges get in the first step, above 0 and below 1. The rule as it
    was published begins with 0.5.
    """
    signal: Literal["busy", "filled", "hardware"] = "busy"
    """What is compared between the roles. busy: share of a role's time in which a replica ran
    anything. filled: share of its places (sequences that can run at once) that were taken.
    hardware: utilisation of its devices, as NVIDIA's driver says it, which needs
    ``gcore-placement[nvml]`` and has not run on a GPU; on cores, processor time of its workers
    over time.
    """
    threshold: float = 0.05
    """Difference between the two roles' signals up to which nothing moves: at least 0, and as
    a share of 1.
    """

    def __post_init__(self) -> None:
        _share(self, "share")
        _require(self.cells >= 1, "cells", f"must be at least 1, is {self.cells}")
        _require(self.threshold >= 0, "threshold", f"must not be negative, is {self.threshold:g}")

    def traits(self) -> Traits:
        if self.signal != "hardware":
            return Traits()
        meters = {
            "cuda": "gcore_placement.nvml:Nvml",
            "cpu": "gcore_placement.processors:Processors",
        }
        return Traits(meters=meters)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Settings of ``placement/replay``."""

    share: float = FIRST_SHARE
    """Share of the cells that the judges get in the first step, above 0 and below 1; ignored when
    the two expected lengths below are set.
    """
    policy_tokens: float = 0.0
    """Expected tokens of an answer, at least 0; 0: not known. When ``judge_tokens`` is set too, the
    first split follows from the work of both roles.
    """
    judge_tokens: float = 0.0
    """Expected tokens of a verdict, at least 0; 0: not known. It counts only together with
    ``policy_tokens``.
    """
    modes: list[str] = field(default_factory=lambda: ["split", "colocated"])
    """Modes that may be chosen, from split, colocated and coresident; split must be among them.
    colocated is considered once the cost of changing roles was measured.
    """
    discount: float = 0.85
    """Weight of a step's regrets relative to those of the step after it, at least 0 and below 1; 0:
    only the latest step counts.
    """
    caution: float = 0.12
    """How far the next step's best split is expected to lie from that of the latest steps, at least
    0: a standard deviation, in log-odds of the judges' share.
    """
    correction: float = 0.5
    """How fast the replay learns by how much engines are slower than their profiles: weight of the
    latest step, from 0 (profiles are taken as they are) to 1 (earlier steps do not count).
    """
    draws: int = 3
    """How often a step is replayed, at least 1, each time with other groups drawn from it."""
    largest: int = 64
    """Most cells that are replayed, at least 2. Of a larger cluster a part is replayed that has the
    same work in each cell.
    """
    splits: int = 32
    """Most splits that are tried, at least 1; the choice may lie between two of them."""
    tolerance: float = 0.3
    """Largest relative difference between a step's replayed and measured time at which the replay
    counts as right, at least 0; 0.3 is 30%.
    """
    patience: int = 5
    """Number of steps in a row with a wrong replay, at least 1, after which the split with the
    least measured time is taken instead. After as many steps without a mode that ran before, the
    mode is tried for one step.
    """
    seed: int = 0
    """Seed of the draws of groups; any whole number that is not negative."""

    def __post_init__(self) -> None:
        _share(self, "share")
        _require(
            0 <= self.discount < 1,
            "discount",
            f"must be at least 0 and below 1, is {self.discount:g}",
        )
        _require(
            0 <= self.correction <= 1,
            "correction",
            f"must be from 0 to 1, is {self.correction:g}",
        )
        for name in ("policy_tokens", "judge_tokens", "caution", "tolerance", "seed"):
            value = getattr(self, name)
            _require(value >= 0, name, f"must not be negative, is {value:g}")
        for name in ("draws", "splits", "patience"):
            _require(
                getattr(self, name) >= 1, name, f"must be at least 1, is {getattr(self, name)}"
            )
        _require(self.largest >= 2, "largest", f"must be at least 2, is {self.largest}")
        unknown = sorted(set(self.modes) - {"split", "colocated", "coresident"})
        _require(
            not unknown, "modes", f"{', '.join(unknown)}: there are split, colocated and coresident"
        )
        _require("split" in self.modes, "modes", "must hold split, which every cluster can do")
