"""Says what a run must be for generation to go on while it trains, and what a person should know.

What can be known before processes start, ``g-core check`` says too.
"""

from __future__ import annotations

from pathlib import Path

from gcore_async.config import AsyncConfig
from gcore_async.replaying import check_rows
from gcore_core.contract.errors import ConfigError
from gcore_core.controllers.context import ControllerContext


def refuse(config: AsyncConfig, context: ControllerContext) -> None:
    """Raises ConfigError for what a run cannot do while generation goes on.

    A replay is also refused over other data than that of the earlier run.
    """
    facts = context.facts
    if facts.resting:
        raise ConfigError(
            "async generates while it trains, and these generators sleep meanwhile.",
            where=f"roles.{facts.resting[0]}",
            todo="give them devices of their own, or set placement.sleep_in_training: never",
        )
    if facts.placement is not None and config.midway != "wait":
        raise ConfigError(
            "a placement policy moves devices at pushes, and samples would be in flight there.",
            where="controller.config.midway",
            todo="set midway: wait, or placement.use: core/even",
        )
    if facts.run.deterministic and config.ahead and not config.may_be_deterministic():
        raise ConfigError(
            "a deterministic run cannot push weights into samples that run: when a push comes "
            "depends on the clock.",
            where="controller.config.midway",
            todo="set midway: wait; or midway: recompute and order: clock, so that a replay "
            "repeats the run; or run.deterministic: false",
        )
    if config.replay is not None and facts.trace:
        check_rows(Path(facts.trace).parent, config.replay)


def notes_at_start(config: AsyncConfig, steps: int, last_step: int | None) -> list[str]:
    """Returns what a person should know of a replay, and of several updates a step.

    steps: of the run.
    last_step: the step behind the last one of the journal; None where nothing is replayed.
    """
    notes = []
    if last_step is not None:
        notes.append(f"it repeats {config.replay}")
        if last_step < steps:
            notes.append(
                f"the journal of that run ends with step {last_step}, and so does this run"
            )
    updates = config.updates_per_step() if config.ahead else 1
    if updates > 1:
        notes.append(
            f"{updates} updates a step: at the last of them records are further from the "
            "weights than their age says (controller.config.minibatches, epochs)"
        )
    return notes
