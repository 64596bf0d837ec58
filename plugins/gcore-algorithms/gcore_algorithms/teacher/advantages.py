"""The advantage of runs that learn from a teacher alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gcore_algorithms.teacher.config import NoRewardConfig
from gcore_core.contract.algorithms import GroupScalars


class NoReward:
    """Gives every record the advantage 0; see ``gcore_core.contract.algorithms.Advantage``."""

    requires: frozenset[str] = frozenset()

    def __init__(self, config: NoRewardConfig) -> None:
        self.group_size = config.group_size

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        return np.zeros(0)

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [np.zeros(len(group.rewards)) for group in groups]
