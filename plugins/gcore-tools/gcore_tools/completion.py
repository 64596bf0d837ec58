"""The plugin ``completion``: ``g-core completion SHELL`` prints the script by which a shell
completes the command.

The script holds all verbs, their options, and the commands of the plugins that are installed when
it is printed. Nothing of G-Core runs when Tab is pressed.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.errors import ConfigError, GcoreError
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.installing import install_command
from gcore_core.contract.providers import CommandProvider

SUMMARY = "print the script by which a shell completes the command"
SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
examples:
  g-core completion bash > ~/.local/share/bash-completion/completions/g-core
  g-core completion zsh > ~/.zfunc/_g-core        with fpath+=~/.zfunc before compinit
  g-core completion fish > ~/.config/fish/completions/g-core.fish

Print it anew when a plugin with commands was installed.
"""


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary=SUMMARY,
        factory="gcore_tools.completion:run",
        parser="gcore_tools.completion:make_parser",
    )


def make_parser() -> argparse.ArgumentParser:
    from gcore_core.kits.commands import command_parser

    parser = command_parser("completion", SUMMARY)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.epilog = _EPILOG
    return parser


def run(words: Sequence[str]) -> int:
    """Prints the script, and returns the exit code."""
    args = make_parser().parse_args(words)
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError as error:
        raise ConfigError(
            "it needs shtab, which is not installed.",
            where="g-core completion",
            todo=install_command("gcore-tools[completion]"),
        ) from error
    print(shtab.complete(whole_parser(shtab.FILE), args.shell))
    return 0


def whole_parser(files: object) -> argparse.ArgumentParser:
    """Returns one parser of all verbs and plugins' commands.

    files: how an argument that is a path is marked.
    """
    from gcore_core.kits.commands import VERBS, verb_parser

    parser = argparse.ArgumentParser(prog="g-core")
    parser.add_argument("--no-plugins", action="store_true", help="leave only the built-in plugin")
    parser.add_argument("--version", action="store_true", help="print the version")
    parsers = parser.add_subparsers(dest="verb")
    for verb, summary in VERBS.items():
        _add(parsers, verb, summary, verb_parser(verb), files)
    for plugin, commands in _commands().items():
        if plugin in VERBS:
            continue  # the verb's own parser has its actions
        default = commands.get("default")
        own = _parser_of(default) if default else None
        if default and own:
            _add(parsers, plugin, default.summary, own, files)
            continue
        plugin_parser = parsers.add_parser(plugin, help=f"commands of the plugin {plugin}")
        if not default:
            plugin_parser.add_argument("command", choices=sorted(commands))
        plugin_parser.add_argument("words", nargs="*").complete = files  # type: ignore[attr-defined]
    return parser


def _add(
    parsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    parser: argparse.ArgumentParser,
    files: object,
) -> None:
    """Adds a command with the arguments of its parser."""
    parsers.add_parser(name, help=summary, parents=[parser], add_help=False)
    for action in parser._actions:
        if action.type is Path:
            action.complete = files  # type: ignore[attr-defined]


def _parser_of(command: CommandProvider) -> argparse.ArgumentParser | None:
    """Returns the parser of a command; None where it names none, or one that does not import."""
    if not command.parser:
        return None
    try:
        parser: argparse.ArgumentParser = import_attribute(command.parser)()
    except GcoreError:
        return None  # g-core doctor tells
    return parser


def _commands() -> dict[str, dict[str, CommandProvider]]:
    """Returns plugin -> its commands by name, of every plugin that can be loaded."""
    from gcore_core.kits.commands import Plugins, catalog

    installed = catalog.scan()
    plugins = Plugins()
    for name in installed.names():
        try:
            plugins.load(installed.get(name, where=""))
        except GcoreError:
            continue  # g-core doctor tells
    commands: dict[str, dict[str, CommandProvider]] = {}
    for item in plugins.providers("command"):
        if isinstance(item.spec, CommandProvider):
            commands.setdefault(item.plugin, {})[item.spec.name] = item.spec
    return commands
