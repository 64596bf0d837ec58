"""Says what a run must be for generation to go on while it trains, and what a person should know.

What can be known before processes start, ``g-core check`` says too.
"""

from __future__ import annotations

from gcore_async.config import AsyncConfig
from gcore_core.contract.errors import ConfigError
from gcore_core.kits.programs import ControllerContext


def refuse(config: AsyncConfig, context: ControllerContext) -> None:
    """Raises ConfigError for what a run cannot do while generation goes on."""
    facts = context.facts
    if facts.asleep_in_training:
        raise ConfigError(
            "async generates while it trains, and these generators sleep meanwhile.",
            where=f"roles.{facts.asleep_in_training[0]}",
            todo="give them devices of their own, or set placement.sleep_in_training: never",
        )
    if facts.placement is not None and config.midway != "wait":
        raise ConfigError(
            "a placement policy moves devices at pushes, and samples would be in flight there.",
            where="controller.config.midway",
            todo="set midway: wait, or placement.use: core/even",
        )
    if facts.run.deterministic and config.ahead and config.midway != "wait":
        raise ConfigError(
            "a deterministic run cannot push weights into samples that run: when a push comes "
            "depends on the clock.",
            where="controller.config.midway",
            todo="set midway: wait, or run.deterministic: false",
        )


def notes_at_start(config: AsyncConfig) -> list[str]:
    """Returns what a person should know of several updates a step."""
    updates = config.updates_per_step() if config.ahead else 1
    if updates <= 1:
        return []
    return [
        f"{updates} updates a step: at the last of them records are further from the weights than "
        "their age says (controller.config.minibatches, epochs)"
    ]
