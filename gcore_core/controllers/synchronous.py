"""``core/sync``: generation, rewarding, preparation, training, push; then the next step.

Every shard runs this same program over its own groups. Generation and rewarding are
``take``, preparation and training ``train``, and ``end`` pushes, saves and evaluates.
"""

from __future__ import annotations

from gcore_core.controllers.step_program import StepProgram
from gcore_core.controllers.tracing import Stopwatch


class SynchronousController(StepProgram):
    """One shard's part of the program."""

    async def step(self, step: int) -> bool:
        """Makes one pass of the four stages and one push; returns whether it was the last one."""
        watch = Stopwatch(self.context.trace, step)
        taken = await self.take(step)
        watch.lap("rollout")
        await self.placement.sleep()
        trained = await self.train(step, taken, watch)
        return await self.end(step, taken, trained, watch)
