"""The provider ``deepspeed`` of kind trainer: AdamW with ZeRO on a Hugging Face causal language
model.
"""

from __future__ import annotations

from gcore_language.adapter_push import PushesAdapter
from gcore_language.offload import OffloadsInRollout
from gcore_language.training import LanguageTrainer
from gcore_language.value_training import ValueTraining
from gcore_language.values import trains_values

from gcore_core.contract.context import WorkerContext
from gcore_deepspeed.config import DeepSpeedTrainerConfig
from gcore_deepspeed.engine import DeepSpeedEngine


class DeepSpeedTrainer(PushesAdapter, OffloadsInRollout, LanguageTrainer):
    """One data-parallel rank of a policy; see ``gcore_core.contract.trainer.Trainer``."""

    _engine: DeepSpeedEngine  # all bases have one, each with the methods that it calls

    def __init__(self, config: DeepSpeedTrainerConfig, context: WorkerContext) -> None:
        super().__init__(config, context, DeepSpeedEngine(config, context))


class DeepSpeedValueTrainer(ValueTraining, DeepSpeedTrainer):
    """One data-parallel rank of a model with a value head; see ``gcore_language.values``."""


def make_trainer(config: DeepSpeedTrainerConfig, context: WorkerContext) -> DeepSpeedTrainer:
    """Makes a rank that trains values where the objective requires them, else a policy."""
    kind = DeepSpeedValueTrainer if trains_values(context) else DeepSpeedTrainer
    return kind(config, context)
