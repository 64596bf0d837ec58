"""The plugin ``new`` writes the distribution of a new plugin: ``g-core new NAME --kind KIND``."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="write a distribution to begin a plugin with, and a test that it must pass",
        factory="gcore_testing.scaffold.command:run",
        parser="gcore_testing.scaffold.command:make_parser",
    )
