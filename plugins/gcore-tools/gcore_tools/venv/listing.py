"""Lists the named venvs, and says whether each is still what it should be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, PluginError
from gcore_core.kits.commands import venvs
from gcore_tools.venv.making import is_being_made
from gcore_tools.venv.recipe import Wish, recipe


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One venv.

    name: by which jobs name it.
    record: what is written in its record file.
    state: ready, being made, half made or stale.
    reason: what is stale about it; empty unless it is stale.
    """

    name: str
    record: dict[str, Any]
    state: str
    reason: str = ""

    @property
    def python(self) -> Path:
        """The path of the venv's interpreter."""
        return venvs.root() / self.name / "bin" / "python"

    @property
    def remake(self) -> str:
        """The command that makes the venv what it should be."""
        return venvs.command(venvs.root() / self.name)


def listed() -> list[Listed]:
    """Returns every named venv; imports the roots of the plugins that they are for."""
    files = sorted(venvs.root().glob(f"*/{venvs.RECORD}"))
    return [_look_at(file.parent.name, venvs.record(file.parent)) for file in files]


def _look_at(name: str, record: dict[str, Any]) -> Listed:
    """Returns a venv with its state."""
    if is_being_made((venvs.root() / name).resolve()):
        return Listed(name=name, record=record, state="being made")
    if not record.get("complete"):
        return Listed(name=name, record=record, state="half made")
    reason = _stale(record)
    return Listed(name=name, record=record, state="stale" if reason else "ready", reason=reason)


def _stale(record: dict[str, Any]) -> str:
    """Returns why the same command would make another venv now; empty when it would not."""
    wish = Wish(
        plugin=record["plugin"],
        flavour=record["flavour"],
        python=record["python"],
        extra=tuple(record["with"]),
    )
    try:
        current = recipe(wish, where="")
    except (ConfigError, PluginError) as error:
        return error.what
    if current.digest() == record["digest"]:
        return ""
    versions = record["versions"]
    differ = [
        (
            f"{source.distribution} is {versions.get(source.distribution) or 'missing'} there, "
            f"{source.version} here"
        )
        for source in current.sources
        if versions.get(source.distribution) != source.version
    ]
    return "; ".join(differ) or "its pins have changed"


def row_of(name: str, record: dict[str, Any], state: str, reason: str = "") -> dict[str, Any]:
    """Turns a venv into a row for a person or a tool."""
    engine = record.get("engine", "")
    return {
        "name": name,
        "plugin": record.get("plugin", ""),
        "flavour": record.get("flavour", ""),
        "python": str(venvs.root() / name / "bin" / "python"),
        "engine": f"{engine} {record.get('versions', {}).get(engine, '')}".strip(),
        "bytes": record.get("bytes", 0),
        "state": state,
        "reason": reason,
    }


def readable(count: int) -> str:
    """Returns a number of bytes in MB (1e6) or GB (1e9); empty for 0."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB" if count else ""
