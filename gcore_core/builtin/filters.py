"""Filters for dynamic sampling decide which groups teach."""

from __future__ import annotations

import numpy as np

from gcore_core.builtin.config import VariedConfig
from gcore_core.contract.algorithms import GroupScalars, are_equal


class KeepAll:
    """Lets every group teach."""

    def __init__(self, config: None = None) -> None:
        pass

    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        return True, ""


class Varied:
    """Lets a group teach when its rewards are not all equal.

    When they are equal, but for rounding, every advantage is zero (DAPO, section 3.2). The paper
    looks at one reward, whether the answer is right, also where others are added to it.
    """

    def __init__(self, config: VariedConfig | None = None) -> None:
        self._reward = None if config is None else config.reward

    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        if are_equal(self._looked_at(group)):
            return False, "equal_rewards"
        return True, ""

    def _looked_at(self, group: GroupScalars) -> np.ndarray:
        """Returns the numbers to compare, float64[S]; without records that lack the reward."""
        if self._reward is None:
            return group.rewards
        values = group.named[self._reward]
        present: np.ndarray = values[~np.isnan(values)]
        return present
