"""``async``: one stage after the other; meanwhile groups of the next steps are generated.

Every shard runs this same program over its own groups. ``step_program`` has the table of stages.
Generation does not end with ``take``, hence ``drain``; and a checkpoint also holds what has been
generated ahead, hence ``seal``.
"""

from __future__ import annotations

from gcore_async.conditions import notes_at_start, refuse, why_pushes_wait
from gcore_async.config import AsyncConfig
from gcore_core.kits.programs import (
    Ahead,
    ControllerContext,
    Schedule,
    StepProgram,
    Stopwatch,
    SyncConfig,
)


class AsynchronousController(StepProgram):
    """One shard."""

    def __init__(self, config: AsyncConfig, context: ControllerContext) -> None:
        refuse(context)
        self._config = config
        facts = context.facts
        self._why_pushes_wait = why_pushes_wait(
            config, deterministic=facts.run.deterministic, moves=facts.placement is not None
        )
        super().__init__(config, context)

    def make_schedule(self, _: SyncConfig) -> Schedule:
        """Returns what begins groups without a break."""
        config = self._config
        return Ahead.of(config, self.context.facts, ahead=config.ahead, age=config.age)

    async def run(self) -> None:
        """Runs as every program does, and ends generation with it."""
        try:
            await super().run()
        finally:
            await self.producer.stop()

    async def step(self, step: int) -> bool:
        """Makes one pass of the four stages; returns whether it was the last one."""
        watch = Stopwatch(self.context.trace, step)
        taken = await self.take(step)
        watch.lap("rollout")
        trained = await self.train(step, taken, watch)
        if self._why_pushes_wait:
            await self.producer.drain()
        watch.lap("drain")
        taken = self.producer.seal(taken)
        return await self.end(step, taken, trained | self.producer.metrics, watch)

    def _notes(self, step: int) -> list[str]:
        notes = super()._notes(step)
        if step == self.context.facts.start_step:
            notes += notes_at_start(self._config, self._why_pushes_wait)
        return notes
