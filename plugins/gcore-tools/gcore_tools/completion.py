"""``g-core completion SHELL``: prints the script by which a shell completes the command.

The script holds all verbs, their options, and the commands of the plugins that are installed when
it is printed. Nothing of G-Core runs when Tab is pressed.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
examples:
  g-core completion bash > ~/.local/share/bash-completion/completions/g-core
  g-core completion zsh > ~/.zfunc/_g-core        with fpath+=~/.zfunc before compinit
  g-core completion fish > ~/.config/fish/completions/g-core.fish

Print it anew when a plugin with commands was installed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    from gcore_core.contract.errors import ConfigError
    from gcore_core.contract.installing import install_command

    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError as error:
        raise ConfigError(
            "it needs shtab, which is not installed.",
            where="g-core completion",
            todo=install_command("gcore-core[completion]"),
        ) from error
    print(shtab.complete(whole_parser(shtab.FILE), args.shell))
    return 0


def whole_parser(files: object) -> argparse.ArgumentParser:
    """Returns one parser of all verbs and plugins' commands.

    files: how an argument that is a path is marked.
    """
    from gcore_core.cli import VERBS

    parser = argparse.ArgumentParser(prog="g-core")
    parser.add_argument("--no-plugins", action="store_true", help="leave only the built-in plugin")
    parser.add_argument("--version", action="store_true", help="print the version")
    parsers = parser.add_subparsers(dest="verb")
    for verb, summary in VERBS.items():
        verb_parser = parsers.add_parser(verb, help=summary)
        importlib.import_module(f"gcore_core.cli.{verb}").configure(verb_parser)
        verb_parser.epilog = None
        for action in verb_parser._actions:
            if action.type is Path:
                action.complete = files  # type: ignore[attr-defined]
    for plugin, commands in _commands().items():
        plugin_parser = parsers.add_parser(plugin, help=f"commands of the plugin {plugin}")
        if "default" not in commands:
            plugin_parser.add_argument("command", choices=sorted(commands))
        plugin_parser.add_argument("words", nargs="*").complete = files  # type: ignore[attr-defined]
    return parser


def _commands() -> dict[str, list[str]]:
    """Returns plugin -> its commands, of every plugin that can be loaded."""
    from gcore_core.config import catalog
    from gcore_core.config.plugins import Plugins
    from gcore_core.contract.errors import GcoreError

    installed = catalog.scan()
    plugins = Plugins()
    for name in installed.names():
        try:
            plugins.load(installed.get(name, where=""))
        except GcoreError:
            continue  # g-core doctor tells
    commands: dict[str, list[str]] = {}
    for item in plugins.providers("command"):
        commands.setdefault(item.plugin, []).append(item.spec.name)
    return commands
