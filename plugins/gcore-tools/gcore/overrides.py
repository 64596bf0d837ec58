"""Turns what a Python call sets into overrides, the words ``key=value`` of the command line.

Two forms say the same: a mapping of dotted keys, ``{"run.steps": 20}``, and keyword arguments with
``__`` for the dot, ``run__steps=20``. A section of the job may be given as a mapping as well,
``run={"steps": 20}``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, get_type_hints

import msgspec
from gcore_language.json_values import json_value

from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.job_settings import JobSettings
from gcore_core.kits.commands import flat

Overrides = Mapping[str, Any] | Sequence[str] | None
#: Numbers for which JSON has no word, and in whose place its encoder writes null.
_IN_YAML = {math.inf: ".inf", -math.inf: "-.inf"}


def words(overrides: Overrides, keywords: Mapping[str, Any]) -> list[str]:
    """Returns overrides as words ``key=value``; keywords come last, so they win.

    Raises ConfigError for a keyword that names no key, and for a value that no YAML can hold.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            "overrides are a mapping or a list, not one text.",
            where="overrides",
            todo=f'write [{overrides!r}], or {{"run.steps": 10}}',
        )
    if isinstance(overrides, Mapping):
        given = [_word(key, value) for key, value in overrides.items()]
    else:
        given = list(overrides or ())
    for keyword, value in keywords.items():
        given += _of_keyword(keyword, value)
    return given


def _of_keyword(keyword: str, value: Any) -> list[str]:
    if "__" in keyword.strip("_"):
        return [_word(keyword.replace("__", "."), value)]
    sections = [item.name for item in dataclasses.fields(JobSettings)]
    if keyword in sections:
        return [_word(key, inner) for key, inner in flat(value, keyword).items()]
    known = [key.replace(".", "__") for key in _keys()]
    same_end = [key for key in known if key.rpartition("__")[2] == keyword]
    hint = f" (did you mean {same_end[0]}?)" if same_end else did_you_mean(keyword, known)
    raise ConfigError(
        f"there is no argument {keyword!r}{hint}.",
        where="overrides",
        todo="a key of the job has `__` for each dot: run__steps=10; all keys: "
        "docs/reference/config.md",
        choices=same_end or known,
    )


def _keys() -> Iterator[str]:
    """Yields the dotted keys of the core's sections."""
    for section, hint in get_type_hints(JobSettings).items():
        if dataclasses.is_dataclass(hint):
            yield from (f"{section}.{item.name}" for item in dataclasses.fields(hint))


def _word(key: str, value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{key}={_IN_YAML.get(value, '.nan')}"
    try:
        text = flow(json_value(with_paths_as_texts(value))).rstrip()
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"a value of type {type(value).__qualname__} cannot stand in YAML.",
            where=key,
            why=f"{error}",
            todo="give numbers, texts, lists or mappings",
        ) from error
    return f"{key}={text}"


def flow(value: Any) -> str:
    """Returns plain values as YAML on one line.

    None has a tag: a key whose type is text would take the word ``null`` for a text.
    """
    if isinstance(value, dict):
        return f"{{{','.join(f'{flow(str(key))}:{flow(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(flow, value))}]"
    return "!!null " if value is None else msgspec.json.encode(value).decode()


def with_paths_as_texts(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: with_paths_as_texts(one) for key, one in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return [with_paths_as_texts(one) for one in value]
    return value
