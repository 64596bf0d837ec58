"""The balancers: a cost of records, and a way to deal them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore_balance import assign
from gcore_balance.config import CostConfig, TokensConfig
from gcore_balance.cost import CostModel, features
from gcore_core.contract.algorithms import Work


class _Dealer(ABC):
    """Deals records, or whole groups where they share a prompt. ``place``: costs, bins -> the bin
    of each.
    """

    def __init__(self, config: TokensConfig) -> None:
        self._shared = config.prompts == "shared"

    @abstractmethod
    def costs(self, work: Work) -> np.ndarray: ...

    @abstractmethod
    def place(self, costs: np.ndarray, bins: int) -> np.ndarray: ...

    def split(self, work: Work, bins: int) -> list[list[int]]:
        """See ``gcore_core.contract.algorithms.Balancer``."""
        costs = self.costs(work)
        if not self._shared:
            return assign.lists(self.place(costs, bins), bins)
        groups, group = np.unique(work.group, return_inverse=True)
        placed = self.place(np.bincount(group, weights=costs, minlength=len(groups)), bins)
        return assign.lists(placed[group], bins)


class LptTokens(_Dealer):
    """As if attention cost nothing."""

    def costs(self, work: Work) -> np.ndarray:
        _, tokens, _, extra = features(work, self._shared).T
        return np.asarray(tokens + extra)

    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.longest_first(costs, bins)


class _Learner(_Dealer):
    """``gcore_core.contract.algorithms.LearnsCosts``, unless told not to; what it learned outlives
    the process.
    """

    def __init__(self, config: CostConfig) -> None:
        super().__init__(config)
        self._learn = config.learn
        self._model = CostModel(config.hidden_size, self._shared)

    def costs(self, work: Work) -> np.ndarray:
        return self._model.costs(work)

    def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
        return self._model.observe(loads, seconds) if self._learn else None

    def state(self) -> dict[str, Any]:
        """See ``gcore_core.contract.algorithms.KeepsCosts``."""
        return self._model.state() if self._learn else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        if self._learn and state:
            self._model.restore(state)


class Cost(_Learner):
    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.evened_out(costs, bins)


class KarmarkarKarp(_Learner):
    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.differencing(costs, bins)


class Snake(_Learner):
    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.to_and_fro(costs, bins)


class Sorted(_Learner):
    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.in_turn(costs, bins)
