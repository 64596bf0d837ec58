"""The plugin ``watch`` serves the page of a run while it goes on: ``g-core watch RUN``."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="the page of a run while it goes on, with buttons to save and to stop it",
        factory="gcore_report.watch.commands:watch",
    )
