"""The plugin ``venv``: commands that make, list and examine the venvs that engines run in."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="the same as list",
        factory="gcore_tools.venv.commands:default",
    )
    yield CommandProvider(
        name="create",
        summary="make the venv that a plugin's engine needs, with the versions it was tested with",
        factory="gcore_tools.venv.commands:create",
    )
    yield CommandProvider(
        name="list",
        summary="every venv with its state",
        factory="gcore_tools.venv.commands:list_venvs",
    )
    yield CommandProvider(
        name="doctor",
        summary="look at the machine and at every venv; each fault with what mends it",
        factory="gcore_tools.venv.commands:doctor",
    )
