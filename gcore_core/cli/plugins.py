"""``g-core plugins``: lists the plugins that are installed, by their metadata alone.

Its actions ``show`` and ``check`` import a plugin. They are commands of the plugin ``plugins``,
which comes with gcore-testing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from gcore_core.config import catalog

#: What a list does not know; aside, so that a reader of the table gets the table.
_NOT_IMPORTED = (
    "no plugin was imported: a state is what metadata says; to try them: g-core plugins check"
)
_EPILOG = """\
actions:
  list         every plugin with its state; --python: of another interpreter
  show NAME    providers, traits, settings, engine requirements
  check [NAME] import it, in a process of its own, and say what is wrong; without NAME: every plugin

to begin a plugin: g-core new

examples:
  g-core plugins
  g-core plugins list --json --python envs/vllm/bin/python
  g-core plugins show core
  g-core plugins check torch
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = ["list", "show", "check"]
    parser.add_argument(
        "action", nargs="?", type=_action, choices=actions, default="list", help="default: list"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a plugin, or a project's own file (mine.py)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="the interpreter that is meant; default: this one",
    )
    parser.epilog = _EPILOG


def _action(word: str) -> str:
    """Returns the word; ``new`` is a verb by itself, where one may well look for it here."""
    if word == "new":
        raise argparse.ArgumentTypeError("to begin a plugin: g-core new")
    return word


def run(args: argparse.Namespace) -> int:
    if args.action != "list":
        return _run_action(args)
    if args.name:
        from gcore_core.contract.errors import ConfigError

        raise ConfigError(
            f"no such action: {args.name!r}.", todo=f"g-core plugins show {args.name}"
        )
    path = None
    if args.python:
        from gcore_core.config.interpreters import open_interpreter

        path = open_interpreter(args.python, where="--python").path
    print_plugins(catalog.scan(path).plugins, as_json=args.json)
    if not args.json:
        sys.stdout.flush()  # if nobody reads the table, nobody needs the remark
        print(_NOT_IMPORTED, file=sys.stderr)
    return 0


def _run_action(args: argparse.Namespace) -> int:
    """Runs an action that imports plugins, as a command of the plugin ``plugins``."""
    from gcore_core.cli import run_plugin_command

    words = [args.action]
    if args.name:
        words.append(args.name)
    if args.python:
        words += ["--python", args.python]
    if args.json:
        words.append("--json")
    return run_plugin_command("plugins", words)


def print_plugins(rows: Sequence[catalog.Installed], *, as_json: bool) -> None:
    """Prints plugins with their states, as a table or as JSON."""
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    if not rows:
        print("no plugins")
        return
    from gcore_core.cli import print_table

    cells = [
        [
            row.name,
            row.state,
            row.distribution,
            row.version,
            "; ".join(filter(None, (row.reason, *row.notes))),
        ]
        for row in rows
    ]
    print_table(["plugin", "state", "distribution", "version", "remarks"], cells)
