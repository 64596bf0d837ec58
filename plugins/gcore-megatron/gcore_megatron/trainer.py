"""The provider ``megatron`` of kind trainer."""

from __future__ import annotations

from pathlib import Path

from gcore_language.training import LanguageTrainer

from gcore_core.protocols import WorkerContext
from gcore_megatron.checkpoint import PendingSave
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.engine import MegatronEngine


class MegatronTrainer(LanguageTrainer):
    """One rank of a policy; see ``gcore_core.protocols.Trainer``."""

    def __init__(self, config: MegatronTrainerConfig, context: WorkerContext) -> None:
        self._megatron = MegatronEngine(config, context)
        super().__init__(config, context, self._megatron)

    def begin_save(self, directory: Path) -> PendingSave:
        """``save`` that goes on while the next step trains; every rank calls ``wait`` of what it returns."""
        return self._megatron.begin_save(directory, {"version": self.version, "updates": self._updates})
