"""Keeps in a checkpoint what an objective has learned from steps.

It stands under the objective's class and its module, because a resumed run may have another
objective, which must not get it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_core.contract.algorithms import AdaptsToSteps
from gcore_core.contract.local_files import is_local


def learned(objective: Any) -> dict[str, Any]:
    """Returns class name -> state of the objective; empty for one that learns nothing."""
    if not isinstance(objective, AdaptsToSteps):
        return {}
    return {_name(objective): objective.state()}


def restore(objective: Any, states: Mapping[str, Any]) -> None:
    """Gives the objective what ``learned`` returned, if it stands under its class."""
    # Older checkpoints have the class's name without its module.
    state = states.get(_name(objective), states.get(type(objective).__qualname__))
    if isinstance(objective, AdaptsToSteps) and state is not None:
        objective.restore(state)


def _name(objective: Any) -> str:
    """Returns what the objective's state stands under; other modules have classes of that name.

    Of a file of the user's it is the file's name alone, since the run's files may be moved.
    """
    module = type(objective).__module__
    if is_local(module):
        module = module.rpartition(".")[2]
    return f"{module}.{type(objective).__qualname__}"
