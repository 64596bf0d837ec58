"""Reads floats narrower than 64 bits as the shortest decimal that they stand for.

Who wrote 3.14 into a float32 column means 3.14. As a float of 64 bits its content is
3.140000104904175, which no text and no tolerance of a reward takes for 3.14.

Types are Arrow's. Arrow is not imported here: who has such a type has imported it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

Convert = Callable[[Any], Any]

_KINDS: Mapping[str, type[np.floating[Any]]] = {"float": np.float32, "halffloat": np.float16}


def shortest(value: float, kind: type[np.floating[Any]]) -> float:
    """Returns the float of 64 bits whose text is the shortest that means a narrow one."""
    return float(str(kind(value)))


def converters(schema: Iterable[Any]) -> dict[str, Convert]:
    """Returns column -> what reads its values, for the columns that hold narrow floats.

    schema: fields with ``name`` and ``type``, as an Arrow schema has them.
    """
    found = ((field.name, _converter(field.type)) for field in schema)
    return {name: convert for name, convert in found if convert is not None}


def converted(row: Mapping[str, Any], by_column: Mapping[str, Convert]) -> dict[str, Any]:
    """Returns a row with its narrow floats as their shortest decimals."""
    return {
        name: by_column[name](value) if name in by_column else value for name, value in row.items()
    }


def _converter(kind: Any) -> Convert | None:
    if str(kind) in _KINDS:
        narrow = _KINDS[str(kind)]
        return lambda value: None if value is None else shortest(value, narrow)
    # An extension type, such as an array of two dimensions.
    if hasattr(kind, "storage_type"):
        return _converter(kind.storage_type)
    if hasattr(kind, "item_type"):  # a map: a list of pairs
        pair = (_converter(kind.key_type), _converter(kind.item_type))
        return _of_pairs(*pair) if any(pair) else None
    if hasattr(kind, "value_type"):  # a list, or words that are held once
        inner = _converter(kind.value_type)
        return None if inner is None else _of_list(inner)
    if str(kind).startswith("struct<"):
        parts = converters(kind)
        return (lambda value: value and converted(value, parts)) if parts else None
    return None


def _of_list(inner: Convert) -> Convert:
    return lambda value: list(map(inner, value)) if isinstance(value, list) else inner(value)


def _of_pairs(key: Convert | None, item: Convert | None) -> Convert:
    def convert(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [(key(k) if key else k, item(v) if item else v) for k, v in value]

    return convert
