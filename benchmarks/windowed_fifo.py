"""A rival rule for asynchronous training: a windowed queue with back-pressure, which drops nothing.

It follows the design of torchtitan's experiment on reinforcement learning (``windowed_fifo.md``,
2026-07; MiniMax, arXiv:2605.26494, section 6.2.4). With P groups a step, the queue holds
``(ahead + 1) * P`` groups, begun or complete. A step takes the lowest complete ones of the first
``window`` groups behind the lowest that is not taken. That one does not move while it runs, so at
most ``window - 1`` groups overtake it, and then the step waits. Hence the bounds of the age:

    refill "pushed"   ahead + ceil((window - 1) / P)        places are refilled behind a push
    refill "taken"    ahead + 1 + ceil((window - 1) / P)    and as soon as a group is taken

Everything else is the program of ``async``, with its shards, push and engines. It is a plugin by
its file: ``local: [benchmarks/windowed_fifo.py]``, ``controller: {use: windowed_fifo}``. It does
not resume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gcore_async.config import AsyncConfig
from gcore_async.program import AsynchronousController

from gcore_core import hookimpl
from gcore_core.contract.providers import CALLS, PARTS, ControllerProvider
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.generation import Ahead
from gcore_core.controllers.generation.schedule import Membership

Refill = Literal["taken", "pushed"]


def oldest(ahead: int, window: int, refill: Refill, prompts: int) -> int:
    """Returns the largest age that a record can have."""
    return ahead + (refill == "taken") + -(-(window - 1) // prompts)


@dataclass(frozen=True, kw_only=True)
class FifoConfig(AsyncConfig):
    """Holds the settings of the rival.

    window: groups among which a step may choose.
    refill: when the place of a group that was taken is free again.
    """

    window: int = 1
    refill: Refill = "taken"


@dataclass(kw_only=True)
class WindowedFifo(Ahead):
    """Decides as the module says. Every group is taken to teach."""

    window: int = 1
    refill: Refill = "taken"
    picked: list[int] = field(default_factory=list)  # of the step that is being filled

    def issue(self) -> list[int]:
        """Begins groups for all free places of the queue."""
        bounds = self.bounds
        if self.refill == "pushed" and self.version < self.step:
            return []
        places = (bounds.ahead + 1) * bounds.prompts
        queued = len(self._begun) - (len(self.picked) if self.refill == "taken" else 0)
        count = min(places - queued, bounds.steps * bounds.prompts - self.front)
        if count <= 0:
            return []
        return self._begin(self._next(count))

    def take_if_ready(self) -> Membership | None:
        """Takes a step's groups when the window has given enough."""
        if self.wanted < self.step:
            return None
        waiting = sorted(self._begun.keys() - set(self.picked))
        while waiting and len(self.picked) < self.bounds.prompts:
            end = waiting[0] + self.window
            ready = [o for o in waiting if o < end and o in self._told]
            if not ready:
                return None
            self.picked.append(ready[0])
            waiting.remove(ready[0])
        if len(self.picked) < self.bounds.prompts:
            return None
        chosen, self.picked = sorted(self.picked), []
        return self._consume(chosen, all_of_them=False)


class FifoController(AsynchronousController):
    """One shard."""

    def make_schedule(self, config: SyncConfig) -> WindowedFifo:
        """Returns the rival's rule."""
        assert isinstance(config, FifoConfig)
        facts = self.context.facts
        schedule = WindowedFifo.of(config, facts, ahead=config.ahead, age=config.age)
        schedule.window = config.window
        schedule.refill = config.refill
        return schedule


@hookimpl
def gcore_controllers() -> Iterable[ControllerProvider]:
    yield ControllerProvider(
        summary="a windowed queue with back-pressure, to compare with",
        factory="windowed_fifo:FifoController",
        config=FifoConfig,
        calls={**CALLS, "generator": frozenset({"generate", "push"})},
        parts=PARTS,
    )
