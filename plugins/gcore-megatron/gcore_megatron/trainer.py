"""The provider ``megatron`` of kind trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gcore_language.resting import RestsInRollout
from gcore_language.routing import check_routing
from gcore_language.saving import SavingTrainer
from gcore_language.value_training import ValueTraining
from gcore_language.values import trains_values

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.trainer import TrainRecord
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.engine import MegatronEngine


class MegatronTrainer(RestsInRollout, SavingTrainer):
    """One rank of a policy; see ``gcore_core.contract.trainer.Trainer``."""

    _engine: MegatronEngine  # both bases have one, each with the methods that it calls

    def __init__(self, config: MegatronTrainerConfig, context: WorkerContext) -> None:
        super().__init__(config, context, MegatronEngine(config, context))
        self._needs_routing = config.needs_routing()

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """See ``LanguageTrainer.prepare``. Raises DataError for a record without the experts of its
        tokens where the settings ask for their replay.
        """
        if self._needs_routing:
            check_routing(records, self._context.role)
        return super().prepare(records, scalars)

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """See ``LanguageTrainer.train``; a mixture of experts adds the metrics of its routers."""
        metrics = super().train(step, advantages, minibatches, epochs)
        return {**metrics, **self._engine.router_metrics()}


class MegatronValueTrainer(ValueTraining, MegatronTrainer):
    """One rank of a model with a value head; see ``gcore_language.values``."""


def make_trainer(config: MegatronTrainerConfig, context: WorkerContext) -> MegatronTrainer:
    """Makes a rank that trains values where the objective requires them, else a policy."""
    kind = MegatronValueTrainer if trains_values(context) else MegatronTrainer
    return kind(config, context)
