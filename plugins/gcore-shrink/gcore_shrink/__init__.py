"""The plugin ``shrink`` makes the job of a cluster small enough for this machine."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="make a job that runs here: tiny twins of models and data, few steps",
        factory="gcore_shrink.commands:shrink",
    )
