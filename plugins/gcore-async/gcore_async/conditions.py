"""Says what a run must be for generation to go on while it trains, and what a person should know.

What can be known before processes start, ``g-core check`` says: see ``checks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gcore_async.config import AsyncConfig
from gcore_core.contract.errors import ConfigError

if TYPE_CHECKING:  # a check needs no more than the settings
    from gcore_core.kits.programs import ControllerContext


def refuse(context: ControllerContext) -> None:
    """Raises ConfigError where generators sleep while trainers work."""
    if context.facts.asleep_in_training:
        raise ConfigError(
            "async generates while it trains, and these generators sleep meanwhile.",
            where=f"roles.{context.facts.asleep_in_training[0]}",
            todo="give them devices of their own, or set placement.sleep_in_training: never",
        )


def why_pushes_wait(config: AsyncConfig, *, deterministic: bool, moves: bool) -> str:
    """Returns why pushes wait for samples that run, as ``midway: wait`` has it; "": they do not.

    deterministic: as ``run.deterministic`` says.
    moves: whether the placement policy may move devices.
    """
    if config.midway == "wait":
        return "controller.config.midway is wait"
    if deterministic:
        return "in a deterministic run the clock must not say when a push comes"
    if moves:
        return "the placement policy moves devices then"
    return ""


def notes_at_start(config: AsyncConfig, why: str) -> list[str]:
    """Returns what a person should know of pushes that wait and of several updates a step.

    why: pushes wait; "": they do not.
    """
    notes = []
    if why and config.midway != "wait":
        notes.append(f"pushes wait for samples that run (controller.config.midway), since {why}")
    updates = config.traits().updates_per_step if config.ahead else 1
    if updates > 1:
        notes.append(
            f"{updates} updates a step: at the last of them records are further from the weights "
            "than their age says (controller.config.minibatches, epochs)"
        )
    return notes
