"""Compares a tree of plain values with the classes of the core's settings.

The classes stand in ``gcore_core.contract.job_settings``. Their ``config`` nodes are open; the
chosen provider's dataclass takes the place of each (see ``gcore_core.config.plan``).
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, NoReturn

import msgspec

from gcore_core.config.yaml12 import NULLS, scalar
from gcore_core.config.yaml_source import Word
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.job_settings import KEYS, KIND, LIMIT, JobSettings, Limit

#: Pattern for the name of a role, a reward, an observer or a scorer worker.
NAME = re.compile(r"[A-Za-z_][\w-]*")
#: Finds the hints of a class once.
_type_hints = cache(typing.get_type_hints)


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


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Fits what a user wrote to the types of the keys.

    OmegaConf checks plain values, but it reports a wrong container without its path, and it makes
    texts of numbers whose own form is lost by then, and numbers of texts by the rules of Python.

    words, origins: see ``yaml_source.Source``.
    """

    words: Mapping[str, Word]
    origins: Mapping[str, str]

    def fit(self, hint: Any, value: Any, text: Any, path: str = "") -> Any:
        """Returns a value in which each key whose type is text has the text that was written.

        Raises ConfigError where ``hint`` wants a mapping, a list or a plain value and ``value`` is
        another.

        text: what was written for the value, or for each value within it.
        """
        members = [one for one in _members(hint) if one is not type(None)]
        word = self.words.get(path)
        if word is not None and _is_text(members) and _is_no_container(word, value, members):
            return word.text
        if word is not None and word.error is not None and hint is not Any:
            raise word.error
        if hint is Any or _is_reference(value):
            return value
        if isinstance(value, Mapping | list):
            return self._container(members, value, text, path)
        if value is None:
            is_null = text in NULLS and type(None) in _members(hint)
            return None if is_null or not _is_text(members) else text
        return self._plain(members, value, text, path)

    def _container(self, members: list[Any], value: Any, text: Any, path: str) -> Any:
        is_mapping = isinstance(value, Mapping)
        wanted = [one for one in members if (_is_mapping if is_mapping else _is_list)(one)]
        if not wanted:
            self._refuse_other(members, value, path)
            return value
        if is_mapping:
            texts = text if isinstance(text, Mapping) else {}
            below = {
                key: self.fit(inner, value[key], texts.get(key), f"{path}.{key}" if path else key)
                for key, inner in children(wanted[0], value)
            }
            return {**value, **below}
        is_same = isinstance(text, list) and len(text) == len(value)
        inner = (*typing.get_args(wanted[0]), Any)[0]
        return [
            self.fit(inner, item, text[index] if is_same else None, f"{path}[{index}]")
            for index, item in enumerate(value)
        ]

    def _plain(self, members: list[Any], value: Any, text: Any, path: str) -> Any:
        """Returns a value that is no mapping and no list, as its type has it."""
        plain = _plain_types(members)
        if not plain:
            self._refuse_other(members, value, path)
        takes_text = any(map(_is_text_type, plain))
        fits = any(type(value) is one or (one is float and type(value) is int) for one in plain)
        if takes_text and not (fits and type(value) is not str):
            return value if text is None else text
        is_number = bool(plain) and all(one in (bool, int, float) for one in plain)
        if is_number and type(value) is str and "${" not in value:
            meant = scalar(value)
            if type(meant) not in (bool, int, float):
                self._refuse(
                    " or ".join(one.__name__ for one in plain),
                    value,
                    path,
                    todo="numbers are 1000, 1e3, 0x3E8, .inf; bools true or false, as in YAML 1.2",
                )
            return meant
        return value

    def _refuse_other(self, members: list[Any], value: Any, path: str) -> None:
        """Raises ConfigError where one type is wanted, by whose name an error can tell it."""
        if len(members) == 1 and (wanted := _name(members[0])):
            self._refuse(wanted, value, path)

    def _refuse(self, wanted: str, value: Any, path: str, todo: str = "") -> NoReturn:
        raise ConfigError(
            f"expected {wanted}, got {_shown(value)}.",
            where=path,
            why=self.origins.get(path, ""),
            todo=todo,
        )


def _members(hint: Any) -> tuple[Any, ...]:
    """Returns what a hint allows: the parts of a union, or itself alone."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def _plain_types(members: list[Any]) -> list[Any]:
    return [one for one in members if not _is_mapping(one) and not _is_list(one)]


def _is_text(members: list[Any]) -> bool:
    """Says whether all plain values among the parts of a hint are texts, and there is one."""
    plain = _plain_types(members)
    return bool(plain) and all(map(_is_text_type, plain))


def _is_text_type(hint: Any) -> bool:
    words = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    return hint is str or (bool(words) and all(isinstance(word, str) for word in words))


def _is_mapping(hint: Any) -> bool:
    return is_dataclass(hint) or hint is dict or typing.get_origin(hint) is dict


def _is_list(hint: Any) -> bool:
    return hint is list or typing.get_origin(hint) is list


def _is_reference(value: Any) -> bool:
    """Says whether a value is an interpolation: it may become anything, and is checked then."""
    return isinstance(value, str) and value.startswith("${")


def _is_no_container(word: Word, value: Any, members: list[Any]) -> bool:
    """Says whether an override of a text is that text, although YAML may see a container in it.

    A template such as {question} or a pattern such as [a-z] is. What is JSON, too, as a list of
    numbers or of quoted texts is, and as most that a call of Python gives, is none, and neither is
    what the key takes besides a text.
    """
    is_taken = _is_mapping if isinstance(value, Mapping) else _is_list
    if word.error is None and any(map(is_taken, members)):
        return False
    try:
        return not isinstance(msgspec.json.decode(word.text), dict | list)
    except msgspec.DecodeError:
        return True


def children(expected: Any, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (key, type hint) for the keys of ``value`` that the expected type knows."""
    if is_dataclass(expected):
        keys = {one.name: one.metadata[KEYS] for one in fields(expected) if KEYS in one.metadata}
        hints = _type_hints(typing.cast(type, expected)) | keys
        yield from ((key, hints[key]) for key in value if key in hints)
    else:
        _, inner = typing.get_args(expected) or (Any, Any)
        yield from ((key, inner) for key in value)


def _keys(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, default) of every field below a settings class."""
    defaults = cls()
    hints = typing.get_type_hints(cls)
    for one in fields(cls):
        name = prefix + one.name
        hint = _without_none(hints[one.name])
        default = getattr(defaults, one.name)
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


def _name(hint: Any) -> str:
    """Returns what a hint wants as an error message says it; empty where OmegaConf says it."""
    if _is_mapping(hint) or _is_list(hint):
        return "a mapping" if _is_mapping(hint) else "a list"
    return str(hint.__name__) if hint in (str, int, float, bool) else ""


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
