"""Runs ``g-core venv create``, ``list`` and ``doctor``, and prints what they return."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from pathlib import Path

from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.kits.commands import venvs

_COMMANDS = ("create", "list", "doctor")
_EPILOG = """\
commands (each has its own --help):
  create PLUGIN  make the venv that a plugin's engine needs, with the versions it was tested with
  list           every venv with its state
  doctor [NAME]  look at the machine and at every venv, or at one; each fault with what mends it

In a job, `python: venv:vllm` is the interpreter of the venv named vllm. Venvs are made in
$G_CORE_VENVS, or in ~/.local/share/g-core/venvs. To remove one, remove its directory.

examples:
  g-core venv create vllm
  g-core venv create vllm --cpu --python python3.12
  g-core venv create megatron --with algorithms --name megatron-nightly
  g-core venv doctor
"""
_EPILOG_OF_CREATE = """\
What an option leaves open is what the venv had, if it was made before. pip is configured as ever,
by PIP_... and pip.conf.
"""


def default(words: list[str]) -> int:
    """Runs ``g-core venv``, which lists the venvs; with ``--help`` it prints the overview.

    Raises ConfigError for an unknown command.
    """
    if words and not words[0].startswith("-"):
        raise ConfigError(
            f"no such command: {words[0]!r}{did_you_mean(words[0], list(_COMMANDS))}.",
            where="g-core venv",
            todo=f"choices: {', '.join(_COMMANDS)}",
            choices=list(_COMMANDS),
        )
    parser = _parser("", "Makes, lists and examines the venvs that engines run in.", _EPILOG)
    _add_json(parser)
    return _list(parser.parse_args(words).json)


def list_venvs(words: list[str]) -> int:
    """Runs ``g-core venv list`` with these command-line arguments; returns the exit code.

    Raises ConfigError when a name is given.
    """
    parser = _parser("list", "Lists every venv with its state.")
    _add_json(parser)
    parser.add_argument("name", nargs="?", help=argparse.SUPPRESS)  # refused below, in our words
    args = parser.parse_args(words)
    if args.name:
        where = "g-core venv list"
        raise ConfigError(f"takes no name, but {args.name!r} is given.", where=where, todo=where)
    return _list(args.json)


def doctor(words: list[str]) -> int:
    """Runs ``g-core venv doctor``; returns 0 when nothing is wrong, else 2."""
    description = "Looks at the machine and at every venv; exit code 0 when nothing is wrong."
    parser = _parser("doctor", description)
    _add_json(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="look at this venv alone")
    args = parser.parse_args(words)
    from gcore_tools.venv.doctor import examine, examine_one, print_findings

    findings = examine_one(args.name) if args.name else examine()
    return print_findings(findings, as_json=args.json)


def create(words: list[str]) -> int:
    """Runs ``g-core venv create PLUGIN`` with these command-line arguments; returns the exit code.

    What an option leaves open is taken from the venv's record, if it was made before.
    """
    args = _parser_of_create().parse_args(words)
    where = "g-core venv create"
    if not args.plugin:
        raise ConfigError("the name of a plugin is missing.", where=where, todo=f"{where} PLUGIN")
    from gcore_tools.venv.listing import readable, row_of
    from gcore_tools.venv.making import make
    from gcore_tools.venv.recipe import Wish, interpreter, recipe

    name = args.name or args.plugin
    link = venvs.directory(name, where="--name" if args.name else where)
    old_record = venvs.record(link)
    owner = old_record.get("plugin", args.plugin)
    if owner != args.plugin and args.fresh:
        old_record = {}  # what was asked for there says nothing of this one
    elif owner != args.plugin:
        raise ConfigError(
            f"venv {name!r} was made for plugin {owner!r}.",
            where=where,
            todo="give this one another name: --name NAME",
        )
    python_before = shutil.which(old_record.get("python", ""))
    wish = Wish(
        plugin=args.plugin,
        flavour=args.flavour or old_record.get("flavour", ""),
        python=interpreter(args.python or python_before),
        extra=tuple(args.extra or old_record.get("with", ())),
    )
    planned = recipe(wish, where=where)
    directory = _place(link, args.dir)
    if not args.json:
        print(f"{name} ({planned.spec.name}): {link}", flush=True)
    # What shows how far it is goes aside, where standard output is to be JSON.
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        venv = make(planned, directory, fresh=args.fresh)
    if link.resolve() != directory:  # a root below a link leads there by itself
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)
    row = row_of(name, venv.record, "ready")
    if args.json:
        print(json.dumps(row | {"seconds": round(venv.seconds, 1)}, indent=2))
        return 0
    took = f"made in {venv.seconds:.0f} s" if venv.seconds else "is ready"
    print(f"{took}: {row['engine']}, {readable(row['bytes'])}\n  in a job: python: venv:{name}")
    return 0


def _place(link: Path, chosen: Path | None) -> Path:
    """Returns the directory in which the venv lies or shall lie.

    Raises ConfigError when the venv already lies elsewhere.

    link: the path of the venv's name, which may be a link.
    chosen: the directory that ``--dir`` names; None: where the name leads.
    """
    linked = link.resolve()
    if chosen is None:
        return linked
    target = chosen.expanduser().resolve()
    if (link.exists() or link.is_symlink()) and target != linked:
        raise ConfigError(
            f"venv {link.name!r} is in {linked}.",
            where="--dir",
            todo="give this one another name: --name NAME",
        )
    return target


def _list(as_json: bool) -> int:
    """Prints every venv with its state; returns the exit code."""
    from gcore_tools.venv.listing import listed, readable, row_of

    rows = [row_of(item.name, item.record, item.state, item.reason) for item in listed()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"no venvs in {venvs.root()}; to make one: g-core venv create PLUGIN")
        return 0
    from gcore_core.kits.commands import print_table

    columns = ["name", "plugin", "flavour", "python", "engine", "size", "state", "reason"]
    cells = [
        [str(row[column]) if column != "size" else readable(row["bytes"]) for column in columns]
        for row in rows
    ]
    print_table(columns, cells)
    return 0


# -- what each command takes -----------------------------------------------------------------------


def _parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Returns a parser for a command; an empty ``command`` is ``g-core venv`` itself."""
    return argparse.ArgumentParser(
        prog=f"g-core venv {command}".rstrip(),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def _parser_of_create() -> argparse.ArgumentParser:
    """Returns the parser of ``g-core venv create``."""
    description = "Makes the venv that a plugin's engine needs."
    parser = _parser("create", description, _EPILOG_OF_CREATE)
    parser.add_argument(
        "plugin", nargs="?", metavar="PLUGIN", help="the plugin whose engine it is for"
    )
    flavour = parser.add_mutually_exclusive_group()
    flavour.add_argument(
        "--cpu",
        dest="flavour",
        action="store_const",
        const="cpu",
        help="for a machine without GPUs",
    )
    flavour.add_argument(
        "--cuda",
        dest="flavour",
        action="store_const",
        const="cuda",
        help="default where a driver is",
    )
    flavour.add_argument("--flavour", metavar="NAME", help="another that the plugin offers")
    parser.add_argument(
        "--python", metavar="PY", help="the interpreter whose venv is used; default: this one"
    )
    parser.add_argument(
        "--with", dest="extra", action="append", metavar="NAME", help="another plugin that goes in"
    )
    parser.add_argument("--name", metavar="NAME", help="what it is called; default: as the plugin")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="where it is made; the name becomes a link to it"
    )
    parser.add_argument("--fresh", action="store_true", help="make it anew, whatever is there")
    _add_json(parser)
    return parser
