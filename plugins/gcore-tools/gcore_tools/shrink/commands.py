"""The command ``g-core shrink``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcore_core.contract.errors import ConfigError, PluginNotFound
from gcore_core.kits.commands import load_plan, read_plan, read_source, yaml12
from gcore_tools.shrink.namespaces import MOST_NODES, problem
from gcore_tools.shrink.shrinking import Shrinking
from gcore_tools.shrink.without_nodes import has_nodes, missing


def shrink(words: Sequence[str]) -> int:
    """Makes a small job of a job."""
    args = _parser().parse_intermixed_args(list(words))
    to = args.output or Path(f"{args.file.stem}-small.yaml")
    if to.exists():
        raise ConfigError("there is a file already", where=str(to), todo="take another name for -o")
    _require_readable(args.file, args.overrides)
    small = Shrinking(
        job=read_job(args.file, args.overrides),
        directory=to.absolute().parent / f"{to.stem}.twins",
        steps=args.steps,
        slots=args.slots,
        engine=args.engine,
        nodes=_nodes(args.nodes),
    )
    small.run()
    to.parent.mkdir(parents=True, exist_ok=True)
    unchecked = to.with_suffix(".unchecked.yaml")
    texts = read_source(args.file, args.overrides).texts
    unchecked.write_text(written(small, args.file, texts), encoding="utf-8")
    load_plan(unchecked)
    unchecked.replace(to)
    for note in small.notes:
        print(note, file=sys.stderr)
    print(f"{to}: g-core run {to}")
    return 0


def _require_readable(file: Path, overrides: Sequence[str]) -> None:
    """Raises what ``g-core check`` would for keys that are wrong, before anything is made of them.

    Whether the job's launcher is installed does not matter: it is left out.
    """
    try:
        read_plan(file, overrides)
    except PluginNotFound as error:
        if error.where != "launcher.use":
            raise
        read_plan(file, [*overrides, "launcher.use=core/local"])


def _nodes(number: int) -> int:
    """Returns the number of nodes. Raises ConfigError where so many cannot be made here."""
    if not 1 <= number <= MOST_NODES:
        raise ConfigError(f"must be from 1 to {MOST_NODES}, is {number}.", where="--nodes")
    if number > 1 and not has_nodes():
        raise missing(f"--nodes {number}")
    if number > 1 and (why := problem()):
        raise ConfigError(
            "there can be no nodes of namespaces here.",
            where=f"--nodes {number}",
            why=why,
            todo="leave --nodes out: all of the job is then on one node",
        )
    return number


def read_job(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a job as plain values, with overrides and without interpolations.

    Paths that lie beside the file are absolute, since the small job may lie elsewhere: those of
    data, models and functions, of ``local``, and of interpreters. Raises ConfigError.
    """
    source = read_source(file, overrides)
    try:
        job: Any = OmegaConf.to_container(OmegaConf.create(source.tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], where=str(file)) from error
    plain: dict[str, Any] = dict(job)
    if isinstance(plain.get("plugins"), list):
        plain["plugins"] = {str(name): None for name in plain["plugins"]}
    base = file.absolute().parent
    _anchor(plain, base)
    if plain.get("local"):
        plain["local"] = [str(base / Path(name).expanduser()) for name in plain["local"]]
    for role in (plain.get("roles") or {}).values():
        if isinstance(role, dict) and "/" in str(role.get("python") or ""):
            # Not resolved: the interpreter of a venv is a link out of it.
            role["python"] = os.path.normpath(base / Path(role["python"]).expanduser())
    return plain


def written(small: Shrinking, source: Path, texts: Mapping[str, Any]) -> str:
    """Returns a small job as YAML, after what was done to it.

    texts: what was written for each value of the large one, and is written again where it stays.
    """
    lines = [
        f"# Made of {source.name} by g-core shrink: here it can be seen whether its parts go",
        "# together, and nothing of what it learns.",
        *(f"#   {note}" for note in small.notes),
    ]
    for name, section in small.job.items():
        text = yaml12.dump({name: section}, {name: texts.get(name)})
        lines.append(text.rstrip("\n"))
    return "\n".join(lines) + "\n"


def _anchor(node: Any, base: Path) -> None:
    """Makes paths absolute that mean files beside the job, in place."""
    for name, value in node.items() if isinstance(node, dict) else ():
        is_path = name in ("path", "known") or str(name).endswith("_path")
        if is_path and isinstance(value, str) and value:
            place = base / Path(value).expanduser()
            if place.exists() or value.startswith(("./", "../", "~")):
                node[name] = str(place.resolve())
        else:
            _anchor(value, base)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="g-core shrink", description="Make a job that runs here, to try how its parts go."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the job, a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="values that win over the file",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the small job; FILE-small.yaml"
    )
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="its steps; 2")
    parser.add_argument("--slots", type=int, default=2, metavar="N", help="most of a role; 2")
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="nodes, out of the kernel's namespaces; 1: no namespaces. More need root and iproute2",
    )
    parser.add_argument(
        "--engine",
        default="torch",
        metavar="PLUGIN",
        help="what takes the place of engines that are not installed; torch",
    )
    return parser
