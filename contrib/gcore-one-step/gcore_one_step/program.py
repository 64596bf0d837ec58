"""Generation one step ahead of training.

While the trainer works on a step's records, generators draw the next step's, under the weights that
this step began with. Before the push nothing is in flight: every sample is drawn under one version,
and a record is one version old when it is trained on, those of the first step excepted.
"""

from __future__ import annotations

from gcore_core.contract.errors import ConfigError
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.step_program import StepProgram
from gcore_core.controllers.tracing import Stopwatch


class OneStepProgram(StepProgram):
    """One shard."""

    def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
        if context.facts.resting:
            raise ConfigError(
                "one-step generates while it trains, and these generators sleep meanwhile.",
                where=f"roles.{context.facts.resting[0]}",
                todo="give them devices of their own, or set placement.sleep_in_training: never",
            )
        super().__init__(config, context)

    async def step(self, step: int) -> bool:
        """Trains on a step's groups while the next step's are drawn; whether it was the last."""
        watch = Stopwatch(self.context.trace, step)
        taken = await self.take(step)
        if not self.is_last(step, taken):
            self.window.produce(step + 1, least=step)
        watch.lap("rollout")
        trained = await self.train(step, taken, watch)
        # Samples that a push cut in two would be of two versions.
        await self.window.drain()
        return await self.end(step, taken, trained, watch)
