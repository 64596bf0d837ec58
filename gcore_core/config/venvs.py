"""Finds the interpreter that ``venv:NAME`` means.

A named venv is a directory below `root`, with a record in it. The plugin venv makes venvs and
writes their records. A record says what was requested and, once all of it is installed, what the
venv holds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.installing import install_command

RECORD = "g-core-venv.json"
MAKER = "gcore-tools"  # the distribution that brings `g-core venv`
_PREFIX = "venv:"
_NAME = re.compile(r"\w[\w.-]*")


def root() -> Path:
    """Returns ``$G_CORE_VENVS``, or ``g-core/venvs`` in the directory of the user's data."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    place = os.environ.get("G_CORE_VENVS") or f"{data}/g-core/venvs"
    return Path(os.path.abspath(Path(place).expanduser()))


def directory(name: str, *, where: str) -> Path:
    """Returns where the named venv is or would be. Raises ConfigError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a venv; letters, digits, '_', '-' and '.' can.",
            where=where,
        )
    return root() / name


def resolve(python: str, *, where: str) -> str:
    """Returns the interpreter that ``venv:NAME`` means, whether the venv exists or not.

    Anything else is returned as it is.
    """
    if not python.startswith(_PREFIX):
        return python
    return str(directory(python.removeprefix(_PREFIX), where=where) / "bin" / "python")


def record(venv: Path) -> dict[str, Any]:
    """Returns the record of a venv; empty when there is none that can be read."""
    try:
        return dict(json.loads((venv / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def command(venv: Path, lacking: Sequence[str] = ()) -> str:
    """Returns the command that makes the venv, or makes it again when it is not as it should be.

    lacking: distributions that the venv does not have. Where its record does not list some of them,
        the command asks for these, and again for all that were asked for when it was made.
    """
    description = record(venv)
    plugin = description.get("plugin", venv.name)
    name = f" --name {venv.name}" if plugin != venv.name else ""
    more = [each for each in lacking if each not in description.get("versions", {})]
    wanted = dict.fromkeys([*description.get("with", []), *more]) if more else ()
    return f"g-core venv create {plugin}{name}{''.join(f' --with {each}' for each in wanted)}"


def require_made(program: Path, *, where: str) -> None:
    """Raises ConfigError when the named venv that the program is in is missing or half made."""
    venv = program.parent.parent
    description = record(venv)
    of_the_user = not description and program.exists()  # made by other means than g-core venv
    if venv.parent != root() or description.get("complete") or of_the_user:
        return
    names = sorted(path.parent.name for path in root().glob(f"*/{RECORD}"))
    missing = f"there is no venv {venv.name!r}{did_you_mean(venv.name, names)}."
    todo = f"make it: {command(venv)}      list: g-core venv list"
    if not any(distributions(name=MAKER)):
        todo = f"install what makes it: {install_command(MAKER)}\nthen: {command(venv)}"
    raise ConfigError(
        f"venv {venv.name!r} is half made." if description else missing,
        where=where,
        why=f"in {root()}: {', '.join(names) or 'none'}",
        todo=todo,
    )
