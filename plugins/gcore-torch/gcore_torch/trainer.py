"""Provides the trainer ``torch``: AdamW on a Hugging Face causal language model."""

from __future__ import annotations

from gcore_language.device_push import PushesFromDevice
from gcore_language.saving import SavingTrainer
from gcore_language.value_training import ValueTraining
from gcore_language.values import trains_values

from gcore_core.contract.context import WorkerContext
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.engine import TorchEngine


class TorchTrainer(PushesFromDevice, SavingTrainer):
    """One data-parallel rank of a policy; see ``gcore_core.contract.trainer.Trainer``."""

    _engine: TorchEngine  # both bases have one, each with the methods that it calls

    def __init__(self, config: TorchTrainerConfig, context: WorkerContext) -> None:
        super().__init__(config, context, TorchEngine(config, context))


class TorchValueTrainer(ValueTraining, TorchTrainer):
    """One data-parallel rank of a model with a value head; see ``gcore_language.values``."""


def make_trainer(config: TorchTrainerConfig, context: WorkerContext) -> TorchTrainer:
    """Makes a rank that trains values where the objective requires them, else a policy."""
    kind = TorchValueTrainer if trains_values(context) else TorchTrainer
    return kind(config, context)
