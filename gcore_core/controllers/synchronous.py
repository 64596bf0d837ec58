"""``core/sync``: one stage after the other, then the next step.

Every shard runs this same program over its own groups. ``step_program`` has the table of stages.
"""

from __future__ import annotations

from gcore_core.controllers.step_program import StepProgram
from gcore_core.controllers.tracing import Stopwatch


class SynchronousController(StepProgram):
    """One shard's part of the program."""

    async def step(self, step: int) -> bool:
        """Makes one pass of the four stages; returns whether it was the last one."""
        watch = Stopwatch(self.context.trace, step)
        taken = await self.take(step)
        watch.lap("rollout")
        await self.placement.sleep()
        trained = await self.train(step, taken, watch)
        return await self.end(step, taken, trained, watch)
