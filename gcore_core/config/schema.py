"""Compares a tree of plain values with the classes of the core's settings.

The classes stand in ``gcore_core.contract.job_settings``. Their ``config`` nodes are open; the
chosen provider's dataclass takes the place of each (see ``gcore_core.config.plan``).
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.job_settings import KIND, LIMIT, JobSettings, Limit

#: Pattern for the name of a role, a reward, an observer or a scorer worker.
NAME = re.compile(r"[A-Za-z_][\w-]*")


def _kinds(cls: type, prefix: str) -> Iterator[tuple[str, str]]:
    """Yields (config path, kind) of every field of a settings class that chooses a provider."""
    hints = typing.get_type_hints(cls)
    for one in fields(cls):
        if KIND in one.metadata:
            yield prefix + one.name, one.metadata[KIND]
        elif is_dataclass(hint := hints[one.name]):
            yield from _kinds(typing.cast(type, hint), f"{prefix}{one.name}.")


#: Sections whose nodes are named by the user, each with a provider of its own.
NAMED = ("roles", "rewards", "observers")
#: Config path at which one provider is chosen -> the provider's kind. The sections of ``NAMED`` are
#: not in it: the role decides the kind below ``roles``, below the others it is that of ``KIND_IN``.
KIND_AT = dict(_kinds(JobSettings, ""))
KIND_IN = {"rewards": "reward", "observers": "observer"}


def limits(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Limit]]:
    """Yields (path, value, limit) of every setting that has a limit beyond its type.

    node: an object of one of the settings' classes.
    prefix: the node's own path with a dot after it; empty for the whole job.
    """
    for one in fields(node):
        path = prefix + one.name
        value = getattr(node, one.name)
        if LIMIT in one.metadata:
            yield path, value, one.metadata[LIMIT]
        # Sections, and the nodes that the user names.
        inner = {path: value} if is_dataclass(value) else {}
        if isinstance(value, dict):
            inner = {f"{path}.{name}": node for name, node in value.items() if is_dataclass(node)}
        for where, section in inner.items():
            yield from limits(section, f"{where}.")


def core_keys() -> dict[str, Any]:
    """Returns every key of the core with its default; ``*`` stands for a name the user gives."""
    return dict(_keys(JobSettings, ""))


def check_containers(hint: Any, value: Any, path: str) -> None:
    """Raises ConfigError where ``hint`` wants a mapping, list or plain value and gets another.

    OmegaConf checks the plain values, but it reports a wrong container without its path.
    """
    expected = _without_none(hint)
    # An interpolation may become anything; it is checked when it is resolved.
    if value is None or (isinstance(value, str) and value.startswith("${")):
        return
    if is_dataclass(expected) or typing.get_origin(expected) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected a mapping, got {_shown(value)}.", where=path)
        for key, inner in children(expected, value):
            check_containers(inner, value[key], f"{path}.{key}" if path else key)
    elif typing.get_origin(expected) is list:
        if not isinstance(value, list):
            raise ConfigError(f"expected a list, got {_shown(value)}.", where=path)
        (inner,) = typing.get_args(expected)
        for index, item in enumerate(value):
            check_containers(inner, item, f"{path}[{index}]")
    elif expected in (str, int, float, bool) and isinstance(value, Mapping | list):
        raise ConfigError(f"expected {expected.__name__}, got {_shown(value)}.", where=path)


def children(expected: Any, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (key, type hint) for the keys of ``value`` that the expected type knows."""
    if is_dataclass(expected):
        hints = typing.get_type_hints(expected)
        yield from ((key, hints[key]) for key in value if key in hints)
    else:
        inner = typing.get_args(expected)[1]
        yield from ((key, inner) for key in value)


def _keys(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, default) of every field below a settings class."""
    defaults = cls()
    for key, hint in typing.get_type_hints(cls).items():
        name = prefix + key
        hint = _without_none(hint)
        default = getattr(defaults, key)
        if is_dataclass(hint):
            if default is None:
                yield name, None
            yield from _keys(typing.cast(type, hint), f"{name}.")
        elif typing.get_origin(hint) is dict and is_dataclass(element := typing.get_args(hint)[1]):
            yield from _keys(typing.cast(type, element), f"{name}.*.")
        else:
            yield name, default


def _without_none(hint: Any) -> Any:
    """Returns X for the hint ``X | None``, Any for another union, and any other hint unchanged."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0] if len(inner) == 1 else Any
    return hint


def _shown(value: Any) -> str:
    """Returns the type and the value as an error message shows them."""
    kind = (
        "a mapping"
        if isinstance(value, Mapping)
        else "a list"
        if isinstance(value, list)
        else type(value).__name__
    )
    return f"{kind}: {value!r}"
