"""Finds gaps in a checkpoint, and refuses to go on from it with a step program that cannot.

Steps that take groups out of order leave gaps: ordinals that are not consumed, below ordinals that
are. A program that takes ordinals in order would begin at the first gap, and train again on those
above it that are consumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_core.contract.errors import ConfigError

#: So many ordinals an error names.
_NAMED = 4


def consumed_above(state: Mapping[str, Any]) -> list[int]:
    """Returns the ordinals that are consumed above the first that is not, sorted.

    state: what the controllers saved (``Window.state``).
    """
    return sorted(state.get("window", {}).get("above", ()))


def refuse_gaps(state: Mapping[str, Any], program: str, where: str) -> None:
    """Raises ConfigError where a state has gaps, for a program that cannot go on from one.

    state: what the controllers saved.
    program: its reference, as in ``controller.use``.
    where: the checkpoint, for the message.
    """
    above = consumed_above(state)
    if not above:
        return
    base = state.get("ledger", {}).get("next_ordinal", 0)
    named = ", ".join(map(str, above[:_NAMED])) + (", ..." if above[_NAMED:] else "")
    steps = steps_to_close(state)
    raise ConfigError(
        f"{program} cannot go on from this checkpoint: its steps took groups out of order.",
        where=where,
        why=(
            f"ordinal {base} is not consumed and {named} above it are: {program} would train on "
            "these again"
        ),
        todo=(
            "resume it with the program that saved it; to change to another one, first let that "
            f"close the gaps: {steps} step{'s' * (steps > 1)} with ahead: 0 and age: 0"
        ),
        above=above,
    )


def steps_to_close(state: Mapping[str, Any]) -> int:
    """Returns after how many steps that take groups in order there is no gap left.

    They take what is not consumed between the first such ordinal and the next new one.

    state: what the controllers saved.
    """
    window = state["window"]
    base = state.get("ledger", {}).get("next_ordinal", 0)
    waiting: int = window["front"] - base - len(window["above"])
    prompts: int = window["bounds"][0]  # groups that a step takes
    return max(1, -(-waiting // prompts))
