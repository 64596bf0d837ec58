"""``g-core plugins``: lists, shows and checks plugins, and begins a new one.

list: what is installed; reads metadata alone.
show: what one plugin offers; imports it.
check: whether a plugin works; imports it in a process of its own.
new: writes the distribution of a new plugin.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_core.config import catalog

if TYPE_CHECKING:
    from gcore_core.config.interpreters import Interpreter

KINDS = (
    "generator, trainer, annotator, reward, placement, balancer, advantage, objective, launcher, "
    "observer, controller, dataset, filter, command"
)
#: What a list does not know; aside, so that whoever reads the table gets the table.
_NOT_IMPORTED = (
    "no plugin was imported: a state is what metadata says; to try them: g-core plugins check"
)
_EPILOG = f"""\
actions:
  list         every plugin with its state; --python: of another interpreter
  show NAME    providers, capabilities, settings, engine requirements
  check [NAME] import it, in a process of its own, and say what is wrong; without NAME: every plugin
  new NAME     write a distribution to begin with, with a test that fails until its marked lines are filled in

kinds of a new plugin: {KINDS},
or PLUGIN/KIND for a template that another plugin brings

examples:
  g-core plugins
  g-core plugins list --json --python envs/vllm/bin/python
  g-core plugins show core
  g-core plugins check torch
  g-core plugins new mine --kind balancer --to gcore-mine
"""  # noqa: E501


def configure(parser: argparse.ArgumentParser) -> None:
    actions = ["list", "show", "check", "new"]
    parser.add_argument("action", nargs="?", choices=actions, default="list", help="default: list")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a plugin, or a project's own file (mine.py)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="the interpreter that is meant; default: this one",
    )
    parser.add_argument("--kind", metavar="KIND", help="new: what it provides")
    parser.add_argument(
        "--to", type=Path, metavar="DIR", help="new: where it is written; default: gcore-NAME"
    )
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    if args.action == "list" and not args.name:
        interpreter = _interpreter(args.python)
        path = interpreter.path if interpreter else None
        code = _list(catalog.scan(path).plugins, args.json)
        if not args.json:
            print(_NOT_IMPORTED, file=sys.stderr)
        return code
    if args.action == "check":
        return _check(args.name, args.python, args.json)
    from gcore_core.contract.errors import ConfigError

    if args.action == "list":
        raise ConfigError(
            f"no such action: {args.name!r}.", todo=f"g-core plugins show {args.name}"
        )
    if not args.name:
        where = f"g-core plugins {args.action}"
        raise ConfigError("which plugin?", where=where, todo=f"{where} NAME")
    if args.action == "new":
        from gcore_core.config.scaffold import write

        written = write(args.name, args.kind or "", args.to)
        print(written.next_steps)
        return 0
    return _show(args.name, args.python, args.json)


def _interpreter(python: str | None) -> Interpreter | None:
    """What ``--python`` names, if it is given."""
    if python is None:
        return None
    from gcore_core.config.interpreters import open_interpreter

    return open_interpreter(python, where="--python")


def _list(rows: Sequence[catalog.Installed], as_json: bool) -> int:
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    if not rows:
        print("no plugins")
        return 0
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
    return 0


def _check(name: str | None, python: str | None, as_json: bool) -> int:
    """Checks one plugin, or all without a name; returns 3 when something is wrong, else 0."""
    from gcore_core.config.plugin_checks import check_all, check_one

    interpreter = _interpreter(python)
    if name is None:
        path = interpreter.path if interpreter else None
        rows = check_all(catalog.scan(path).plugins, interpreter)
        _list(rows, as_json)
        return 3 if any(row.state in ("broken", "clash", "incompatible") for row in rows) else 0
    report = check_one(name, interpreter)
    if as_json:
        print(json.dumps({"plugin": name, **dataclasses.asdict(report)}, indent=2))
    else:
        for problem in report.problems:
            print(problem)
        for note in report.notes:
            print(f"note: {note}")
        if not report.problems:
            print(f"plugin {name!r}: nothing wrong found")
    return 3 if report.problems else 0


def _show(name: str, python: str | None, as_json: bool) -> int:
    from gcore_core.config.interpreters import open_interpreter
    from gcore_core.config.plugin_description import described, find, text
    from gcore_core.config.plugins import Plugins

    interpreter = open_interpreter(python, where="--python")
    plugin = find(name, where="g-core plugins show")
    plugins = Plugins()
    plugins.load(plugin)
    providers = [described(item, interpreter) for item in plugins.provided_by(plugin.name)]
    if as_json:
        print(json.dumps(dataclasses.asdict(plugin) | {"provides": providers}, indent=2))
        return 0
    print(f"{plugin.name} ({plugin.owner}, {plugin.module})")
    for item in providers:
        print("\n" + "\n".join(text(item)))
    return 0
