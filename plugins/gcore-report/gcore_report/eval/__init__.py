"""The plugin ``eval`` asks trained policies the tasks of Inspect, a library of evaluations."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        name="default",
        summary="ask a run's policy, and others beside it, the tasks of Inspect",
        factory="gcore_report.eval.commands:evaluate",
    )
