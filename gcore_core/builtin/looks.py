"""Imports the functions of users that a job names, in a helper process; see ``Look``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.config.user_functions import load_function


def function_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a function cannot be called as the job will call it. It is not called here.

    arguments: ``where``: the section that names it; ``path`` and ``name``, as the section has them;
        ``given``: what it is called with, a name for each argument.
    Raises what ``load_function`` raises.
    """
    function = load_function(Path(arguments["path"]), arguments["name"])
    given = arguments["given"]
    if not _takes(function, len(given)):
        yield (
            f"{arguments['where']}.name: {arguments['name']}{inspect.signature(function)} in "
            f"{arguments['path']} is called with ({', '.join(given)})."
        )


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function takes so many arguments by their places, as far as it says."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
