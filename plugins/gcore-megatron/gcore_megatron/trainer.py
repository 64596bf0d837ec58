"""The provider ``megatron`` of kind trainer."""

from __future__ import annotations

from gcore_language.offload import OffloadsInRollout
from gcore_language.saving import SavingTrainer
from gcore_language.training_experts import TrainsExperts
from gcore_language.value_training import ValueTraining
from gcore_language.values import trains_values

from gcore_core.contract.context import WorkerContext
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.engine import MegatronEngine


class MegatronTrainer(OffloadsInRollout, TrainsExperts, SavingTrainer):
    """One rank of a policy; see ``gcore_core.contract.trainer.Trainer``."""

    _engine: MegatronEngine  # both bases have one, each with the methods that it calls

    def __init__(self, config: MegatronTrainerConfig, context: WorkerContext) -> None:
        super().__init__(config, context, MegatronEngine(config, context))


class MegatronValueTrainer(ValueTraining, MegatronTrainer):
    """One rank of a model with a value head; see ``gcore_language.values``."""


def make_trainer(config: MegatronTrainerConfig, context: WorkerContext) -> MegatronTrainer:
    """Makes a rank that trains values where the objective requires them, else a policy."""
    kind = MegatronValueTrainer if trains_values(context) else MegatronTrainer
    return kind(config, context)
