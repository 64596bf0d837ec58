"""Provides the trainer ``torch``: AdamW on a Hugging Face causal language model."""

from __future__ import annotations

from gcore_language.adapter_push import PushesAdapter
from gcore_language.device_push import PushesFromDevice
from gcore_language.offload import OffloadsInRollout
from gcore_language.saving import SavingTrainer
from gcore_language.shared_values import SharedValues
from gcore_language.training_experts import TrainsExperts
from gcore_language.value_training import ValueTraining
from gcore_language.values import trains_values

from gcore_core.contract.context import WorkerContext
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.engine import TorchEngine


class TorchTrainer(
    PushesAdapter, PushesFromDevice, OffloadsInRollout, TrainsExperts, SavingTrainer
):
    """One data-parallel rank of a policy; see ``gcore_core.contract.trainer.Trainer``."""

    _engine: TorchEngine  # all bases have one, each with the methods that it calls

    def __init__(self, config: TorchTrainerConfig, context: WorkerContext) -> None:
        super().__init__(config, context, TorchEngine(config, context))


class TorchValueTrainer(ValueTraining, TorchTrainer):
    """One data-parallel rank of a model with a value head; see ``gcore_language.values``."""


class TorchSharedTrainer(SharedValues, TorchTrainer):
    """One data-parallel rank of a policy with a value head on its trunk.

    See ``gcore_language.shared_values``.
    """


def make_trainer(config: TorchTrainerConfig, context: WorkerContext) -> TorchTrainer:
    """Makes a rank that trains values where the objective requires them, else a policy.

    The policy has a value head of its own where the settings ask for one.
    """
    if trains_values(context):
        return TorchValueTrainer(config, context)
    kind = TorchSharedTrainer if config.value_head.on else TorchTrainer
    return kind(config, context)
