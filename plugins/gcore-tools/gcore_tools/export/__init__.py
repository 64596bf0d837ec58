"""The plugin ``export``: ``g-core export`` copies a run's weights out."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

SUMMARY = "copy a run's weights out"


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary=SUMMARY,
        factory="gcore_tools.export.command:run",
        parser="gcore_tools.export.command:make_parser",
    )
