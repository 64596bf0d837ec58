"""The balancers: a cost of records, and a way to deal them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore_core.contract.algorithms import Work
from gcore_placement.balance import assign
from gcore_placement.balance.config import CostConfig, TokensConfig
from gcore_placement.balance.cost import CostModel, features


class _Dealer(ABC):
    """Deals records, or whole groups where the records of a group share their prompt."""

    def __init__(self, config: TokensConfig) -> None:
        self._shared = config.prompts == "shared"

    @abstractmethod
    def costs(self, work: Work) -> np.ndarray:
        """Returns the cost of each record, float64[N], in any unit."""

    @abstractmethod
    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        """Returns the bin of each item, int64[N], given the items' costs, float64[N]."""

    def split(self, work: Work, bins: int) -> list[list[int]]:
        """See ``gcore_core.contract.algorithms.Balancer``."""
        costs = self.costs(work)
        if not self._shared:
            return assign.lists(self.place(costs, bins), bins)
        groups, group_of = np.unique(work.group, return_inverse=True)
        bin_of_group = self.place(np.bincount(group_of, weights=costs, minlength=len(groups)), bins)
        return assign.lists(bin_of_group[group_of], bins)


class LptTokens(_Dealer):
    """Deals by the number of tokens, as if attention cost nothing."""

    def costs(self, work: Work) -> np.ndarray:
        _, tokens, _, extra = features(work, self._shared).T
        return np.asarray(tokens + extra)

    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.longest_first(costs, bins)


class _Learner(_Dealer):
    """Deals by costs that are fitted to measured seconds, unless ``learn`` is false.

    See ``gcore_core.contract.algorithms.LearnsCosts``. What it learned is part of checkpoints.
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
    """The costliest record goes first, to the lightest rank; then ranks are evened out."""

    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.evened_out(costs, bins)


class KarmarkarKarp(_Learner):
    """Karmarkar-Karp differencing, with equal counts."""

    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.differencing(costs, bins)


class Snake(_Learner):
    """Sorted by cost and dealt to and fro."""

    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.to_and_fro(costs, bins)


class Sorted(_Learner):
    """Sorted by cost and dealt in turn."""

    def place(self, costs: np.ndarray, bins: int) -> np.ndarray:
        return assign.in_turn(costs, bins)
