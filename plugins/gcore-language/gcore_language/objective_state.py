"""Keeps in a checkpoint what an objective has learned from steps.

It stands under the objective's class, because a resumed run may have another objective, which must
not get it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_core.contract.algorithms import AdaptsToSteps


def learned(objective: Any) -> dict[str, Any]:
    """Returns class name -> state of the objective; empty for one that learns nothing."""
    if not isinstance(objective, AdaptsToSteps):
        return {}
    return {type(objective).__qualname__: objective.state()}


def restore(objective: Any, states: Mapping[str, Any]) -> None:
    """Gives the objective what ``learned`` returned, if it stands under its class."""
    state = states.get(type(objective).__qualname__)
    if isinstance(objective, AdaptsToSteps) and state is not None:
        objective.restore(state)
