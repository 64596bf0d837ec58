"""``async``: while a step is prepared and trained, the groups of the next ones are generated.

Every shard runs this same program over its own groups, as in ``core/sync``. What differs are
``drain``, since generation does not end with ``take``, and ``seal``, since a checkpoint also holds
what has been generated ahead.
"""

from __future__ import annotations

from pathlib import Path

from gcore_async.config import AsyncConfig
from gcore_async.replaying import check_rows
from gcore_core.contract.errors import ConfigError
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.step_program import StepProgram
from gcore_core.controllers.tracing import Stopwatch
from gcore_core.controllers.window import RunningWindow, Taken


class AsynchronousController(StepProgram):
    """One shard."""

    window: RunningWindow

    def __init__(self, config: AsyncConfig, context: ControllerContext) -> None:
        _refuse(config, context)
        self._replay = config.replay
        if config.replay is not None and context.facts.trace:
            check_rows(Path(context.facts.trace).parent, config.replay)
        self._waits_at_push = config.midway == "wait"
        self._updates = config.updates_per_step() if config.ahead else 1
        super().__init__(config, context)

    def make_window(self, config: SyncConfig) -> RunningWindow:
        """Returns what produces groups without a break."""
        assert isinstance(config, AsyncConfig)
        return RunningWindow(
            self.context,
            config,
            self.placement,
            ahead=config.ahead,
            age=config.age,
            replay=config.replay,
            by_clock=config.order == "clock",
        )

    def is_last(self, step: int, taken: Taken) -> bool:
        """Whether the run ends with this step; one that is replayed ends where its journal does."""
        return super().is_last(step, taken) or step + 1 == self.window.last_step

    async def run(self) -> None:
        """Runs as every program does, and ends generation with it."""
        try:
            await super().run()
        finally:
            await self.window.stop()

    async def step(self, step: int) -> bool:
        """One pass over a step's groups and one push; whether it was the last one."""
        watch = Stopwatch(self.context.trace, step)
        taken = await self.take(step)
        watch.lap("rollout")
        trained = await self.train(step, taken, watch)
        if self._waits_at_push:
            await self.window.drain()
        watch.lap("drain")
        taken = self.window.seal(taken)
        return await self.end(step, taken, trained | self.window.metrics, watch)

    def _notes(self, step: int) -> list[str]:
        """Adds what a person should know of a replay, and of several updates a step."""
        notes = super()._notes(step)
        end = self.window.last_step
        if step == self.context.facts.start_step and end is not None:
            notes.append(f"it repeats {self._replay}")
            if end < self.context.facts.run.steps:
                notes.append(f"the journal of that run ends with step {end}, and so does this run")
        if step == self.context.facts.start_step and self._updates > 1:
            notes.append(
                f"{self._updates} updates a step: at the last of them records are further from the "
                "weights than their age says (controller.config.minibatches, epochs)"
            )
        return notes


def _refuse(config: AsyncConfig, context: ControllerContext) -> None:
    """Raises ConfigError for what a run cannot do while generation goes on."""
    facts = context.facts
    if facts.resting:
        raise ConfigError(
            "async generates while it trains, and these generators sleep meanwhile.",
            where=f"roles.{facts.resting[0]}",
            todo="give them devices of their own, or set placement.sleep_in_training: never",
        )
    if facts.placement is not None:
        raise ConfigError(
            "async cannot move devices between roles: its generators always have samples in "
            "flight.",
            where="placement.use",
            todo="set placement.use: core/even",
        )
    if facts.run.deterministic and config.ahead and config.midway != "wait":
        raise ConfigError(
            "a deterministic run cannot push weights into samples that run: when a push comes "
            "depends on the clock.",
            where="controller.config.midway",
            todo="set midway: wait, or run.deterministic: false",
        )
