"""The plugin ``museum``: faults that were reported in public, planted into small runs."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        name="run",
        summary="plant faults into small runs and print what was said of each",
        factory="gcore_museum.commands:run",
    )
    yield CommandProvider(
        name="list",
        summary="every exhibit with the public thread that it re-creates",
        factory="gcore_museum.commands:list_exhibits",
    )
