"""The plugin ``demo``: ``g-core demo`` trains the quickstart twice, kills processes of one run, and
compares the weights.
"""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

SUMMARY = "train the quickstart twice, one of them killed, and compare the weights"


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary=SUMMARY,
        factory="gcore_tools.demo.command:run",
        parser="gcore_tools.demo.command:make_parser",
    )
