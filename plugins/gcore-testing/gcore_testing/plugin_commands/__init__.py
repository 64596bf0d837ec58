"""The plugin ``plugins`` has the actions of ``g-core plugins`` that import a plugin."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

SHOW = "show a plugin's providers, traits, settings and what engines they need"
CHECK = "import a plugin, in a process of its own, and say what is wrong"


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    for name, summary in (("show", SHOW), ("check", CHECK)):
        factory = f"gcore_testing.plugin_commands.{name}:run"
        yield CommandProvider(name=name, summary=summary, factory=factory)


def action_parser(action: str, summary: str) -> argparse.ArgumentParser:
    """Returns a parser of the options that all actions of ``g-core plugins`` have."""
    from gcore_core.kits.commands import command_parser

    parser = command_parser(f"plugins {action}", summary)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--python", metavar="PATH", help="the interpreter; default: this one")
    return parser
