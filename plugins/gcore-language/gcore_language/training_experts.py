"""Trainers of mixtures of experts, on an engine that keeps its routers' books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gcore_core.contract.trainer import TrainRecord
from gcore_core.contract.traits import traits_of
from gcore_language.routing import check_routing
from gcore_language.training import LanguageTrainer, TrainingEngine


class ExpertsEngine(TrainingEngine, Protocol):
    """An engine that can train a mixture of experts."""

    def router_metrics(self) -> dict[str, float]:
        """Returns the metrics of a step's routers, over all ranks; none without experts."""


class TrainsExperts(LanguageTrainer):
    """A trainer whose model may be a mixture of experts."""

    _engine: ExpertsEngine

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """See ``LanguageTrainer.prepare``.

        Raises DataError for a record without the experts of its tokens where the settings ask for
        their replay.
        """
        if traits_of(self._settings).needs_routing:
            check_routing(records, self._context.role)
        return super().prepare(records, scalars)

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """See ``LanguageTrainer.train``; a mixture of experts adds the metrics of its routers."""
        metrics = super().train(step, advantages, minibatches, epochs)
        return {**metrics, **self._engine.router_metrics()}
