"""``g-core env``: makes, lists and examines the environments that engines run in."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from gcore_core.config import environments
from gcore_core.contract.errors import ConfigError

_EPILOG = """\
actions:
  create PLUGIN  make the environment that a plugin's engine needs, with the versions it was tested with
  list           every environment with its state
  doctor         look at the machine and at every environment; each fault with what mends it

In a job, `python: env:vllm` is the interpreter of the environment named vllm. They are made in $G_CORE_ENVS, or in
~/.local/share/g-core/envs. What an option leaves open is what the environment had, if it was made before. pip is
configured as ever, by PIP_... and pip.conf. To remove an environment, remove its directory.

examples:
  g-core env create vllm
  g-core env create vllm --cpu --python python3.12
  g-core env create megatron --with algorithms --name megatron-nightly
  g-core env doctor

Exit code of doctor: 0 when nothing is wrong, else 2.
"""  # noqa: E501


def configure(parser: argparse.ArgumentParser) -> None:
    actions = ["create", "list", "doctor"]
    parser.add_argument("action", nargs="?", choices=actions, default="list", help="default: list")
    parser.add_argument(
        "plugin", nargs="?", metavar="PLUGIN", help="create: the plugin whose engine it is for"
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
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    where = f"g-core env {args.action}"
    if args.action == "create":
        if not args.plugin:
            raise ConfigError("for which plugin?", where=where, todo=f"{where} PLUGIN")
        return _create(args, where)
    if args.plugin:
        raise ConfigError(f"takes no name, but {args.plugin!r} is given.", where=where, todo=where)
    if args.action == "list":
        return _list(args.json)
    from gcore_core.cli.env_doctor import examine, print_findings

    return print_findings(examine(), as_json=args.json)


def _create(args: argparse.Namespace, where: str) -> int:
    from gcore_core.cli.env_listing import readable, shown
    from gcore_core.cli.env_making import make
    from gcore_core.cli.env_recipe import Wish, interpreter, recipe

    name = args.name or args.plugin
    link = environments.directory(name, where="--name" if args.name else where)
    there = {} if args.fresh else environments.record(link)
    owner = there.get("plugin", args.plugin)
    if owner != args.plugin:
        raise ConfigError(
            f"environment {name!r} is one of plugin {owner!r}.",
            where=where,
            todo="call this one otherwise: --name NAME",
        )
    before = shutil.which(there.get("python", ""))
    wish = Wish(
        plugin=args.plugin,
        flavour=args.flavour or there.get("flavour", ""),
        python=interpreter(args.python or before),
        extra=tuple(args.extra or there.get("with", ())),
    )
    found = recipe(wish, where=where)
    directory = _place(link, args.dir)
    if not args.json:
        print(f"{name} ({found.spec.name}): {link}", flush=True)
    made = make(found, directory, fresh=args.fresh)
    if directory != link and not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)
    row = shown(name, made.record, "ready")
    if args.json:
        print(json.dumps(row | {"seconds": round(made.seconds, 1)}, indent=2))
        return 0
    took = f"made in {made.seconds:.0f} s" if made.seconds else "is ready"
    print(f"{took}: {row['engine']}, {readable(row['bytes'])}\n  in a job: python: env:{name}")
    return 0


def _place(link: Path, given: Path | None) -> Path:
    """The directory itself: the named one, what its name links to, or the one that is given."""
    named = link.resolve()
    if given is None:
        return named
    wanted = given.expanduser().resolve()
    if (link.exists() or link.is_symlink()) and wanted != named:
        raise ConfigError(
            f"environment {link.name!r} is in {named}.",
            where="--dir",
            todo="call this one otherwise: --name NAME",
        )
    return wanted


def _list(as_json: bool) -> int:
    from gcore_core.cli.env_listing import listed, readable, shown

    rows = [shown(item.name, item.record, item.state, item.reason) for item in listed()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"no environments in {environments.root()}; to make one: g-core env create PLUGIN")
        return 0
    from gcore_core.cli.table import print_table

    columns = ["name", "plugin", "flavour", "python", "engine", "size", "state", "reason"]
    cells = [
        [str(row[column]) if column != "size" else readable(row["bytes"]) for column in columns]
        for row in rows
    ]
    print_table(columns, cells)
    return 0
