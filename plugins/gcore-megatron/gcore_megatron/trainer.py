"""The provider ``megatron`` of kind trainer."""

from __future__ import annotations

from gcore_language.saving import SavingTrainer

from gcore_core.contract.context import WorkerContext
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.engine import MegatronEngine


class MegatronTrainer(SavingTrainer):
    """One rank of a policy; see ``gcore_core.contract.trainer.Trainer``."""

    def __init__(self, config: MegatronTrainerConfig, context: WorkerContext) -> None:
        super().__init__(config, context, MegatronEngine(config, context))
