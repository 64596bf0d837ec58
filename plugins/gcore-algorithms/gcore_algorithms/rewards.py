"""A reward that looks at lengths alone."""

from __future__ import annotations

from collections.abc import Sequence

from gcore_algorithms.config import OverlongConfig
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import Score, ScoredRecord


class Overlong:
    """DAPO's soft overlong punishment: 0 for most lengths, then down to -1 at the longest.

    Source: Yu et al., "DAPO", arXiv:2503.14476, Eq. 13, with L_max = max_actions and L_cache =
    soft_actions. A completion that is cut off at max_actions gets -1; one that ends a little before
    gets less, so that a policy has a slope to follow.
    """

    def __init__(self, config: OverlongConfig, context: WorkerContext) -> None:
        self._free_actions = config.max_actions - config.soft_actions
        self._soft_actions = config.soft_actions

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Scores every record; masked actions count too, since they take room."""
        return [Score(value=self._penalty(len(record.columns["logp"]))) for record in records]

    def _penalty(self, actions: int) -> float:
        over = actions - self._free_actions
        return max(min(0.0, -over / self._soft_actions), -1.0)
