"""The environments that ``g-core env create`` makes: where they are, and which interpreter
``env:NAME`` means.

Each is a directory with a record in it, which says what was asked for and, from the moment when all
of it is installed, what it holds.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, did_you_mean

RECORD = "g-core-environment.json"
_NAME = re.compile(r"\w[\w.-]*")


def root() -> Path:
    """``$G_CORE_ENVS``, or ``g-core/envs`` where the user's data lies."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(
        os.path.abspath(Path(os.environ.get("G_CORE_ENVS") or f"{data}/g-core/envs").expanduser())
    )


def directory(name: str, *, where: str) -> Path:
    """Where the environment of a name is or would be. Raises ConfigError for what is no name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name an environment; letters, digits, '_', '-' and '.' can.",
            where=where,
        )
    return root() / name


def resolve(python: str, *, where: str) -> str:
    """The interpreter that ``env:NAME`` means, whether it is made or not; anything else as it
    is.
    """
    name = python.removeprefix("env:")
    return python if name == python else str(directory(name, where=where) / "bin" / "python")


def record(environment: Path) -> dict[str, Any]:
    """What is written in an environment; empty when nothing, or nothing readable, is."""
    try:
        return dict(json.loads((environment / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def command(environment: Path) -> str:
    """What makes it, or makes it anew where it is no longer what it should be."""
    plugin = record(environment).get("plugin", environment.name)
    return f"g-core env create {plugin}" + (
        f" --name {environment.name}" if plugin != environment.name else ""
    )


def require_made(program: Path, *, where: str) -> None:
    """Raises ConfigError when this is the interpreter of a named environment that is not there, or
    only half made.
    """
    environment = program.parent.parent
    told = record(environment)
    if environment.parent != root() or told.get("complete") or (not told and program.exists()):
        return
    made = sorted(path.parent.name for path in root().glob(f"*/{RECORD}"))
    missing = f"there is no environment {environment.name!r}{did_you_mean(environment.name, made)}."
    raise ConfigError(
        f"environment {environment.name!r} is half made." if told else missing,
        where=where,
        why=f"in {root()}: {', '.join(made) or 'none'}",
        todo=f"make it: {command(environment)}      list: g-core env list",
    )
