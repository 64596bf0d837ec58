"""Says what JSON has a word for, where encoders make a text of the rest and say nothing."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

#: Integers that every reader of JSON and MessagePack has.
_SMALLEST = -(2**63)
_LARGEST = 2**64 - 1
#: ``dtype.kind`` of arrays whose items are no numbers, bools or texts: bytes, times, records.
_ODD_KINDS = "SMmVc"


def json_value(value: Any) -> Any:
    """Returns a value in the types as which JSON is read: the same, or a list for a tuple.

    Numbers, bools, texts and arrays of numpy become Python's own; a float of fewer than 64 bits is
    the shortest decimal that it stands for, 3.14 and not 3.140000104904175. Whatever
    else there is would be another value for a reader of the JSON: bytes, times, decimals, sets,
    members of an Enum, dataclasses, keys that are no texts, numbers that are not finite, integers
    beyond 64 bits.

    Raises ValueError for these, which names the key and the place below it.
    """
    return _plain(value, ())


def _plain(value: Any, place: tuple[Any, ...]) -> Any:
    if value is None or type(value) is bool:
        return value
    if isinstance(value, enum.Enum):
        raise _problem(place, _typed("a value", value))
    if isinstance(value, int):
        if not _SMALLEST <= value <= _LARGEST:
            raise _problem(place, "an integer beyond 64 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _problem(place, "NaN or an infinity")
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list) or type(value) is tuple:
        return [_plain(one, (*place, number)) for number, one in enumerate(value)]
    if isinstance(value, Mapping):
        return _mapping(value, place)
    return _of_array(value, place)


def _mapping(value: Mapping[Any, Any], place: tuple[Any, ...]) -> dict[str, Any]:
    plain = {}
    for key, one in value.items():
        if not isinstance(key, str) or isinstance(key, enum.Enum):
            raise _problem(place, f"{_typed('a key', key)}: {key!r:.40}")
        plain[str.__str__(key)] = _plain(one, (*place, key))
    return plain


def _of_array(value: Any, place: tuple[Any, ...]) -> Any:
    """Returns arrays and scalars of numpy, and of others that are made like them, as Python's."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    is_array = hasattr(value, "dtype") and hasattr(value, "tolist")
    if not is_array or (kind and kind in _ODD_KINDS):
        raise _problem(place, _typed("a value", value))
    if kind == "f" and value.dtype.itemsize < 8:
        if getattr(value, "ndim", 0):
            return [_plain(one, (*place, number)) for number, one in enumerate(value)]
        return _plain(float(str(value)), place)
    plain = value.tolist()
    if type(plain) is type(value):  # a number of numpy for which Python has none
        raise _problem(place, _typed("a value", value))
    return _plain(plain, place)


def _typed(what: str, value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{what} of type {module}{kind.__qualname__}"


def _problem(place: tuple[Any, ...], what: str) -> ValueError:
    """Returns an error such as ``'answer' holds a value of type bytes, at [3]['x']``."""
    top, *below = place or ("it",)
    path = "".join(f"[{one!r}]" for one in below)
    name = repr(top) if place else top
    return ValueError(f"{name} holds {what}{f', at {path}' if path else ''}")
