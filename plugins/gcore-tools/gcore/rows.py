"""Turns the rows that a Python call gives into what ``core/jsonl`` reads.

Rows are a list of dicts, a file of JSON lines, a ``datasets.Dataset`` or a pandas DataFrame. None
of these libraries is imported here: whoever has such an object has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gcore_language.floats import converted, converters, shortest
from gcore_language.json_values import json_value

from gcore_core.contract.errors import DataError
from gcore_core.kits.commands import pinned


def dataset_of(data: Any, name: str, where: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns (section ``data`` of a job, files beside it: name -> content).

    data: rows, the path of a file of JSON lines, or such a section as a mapping.
    name: of the file that rows are written to.
    where: what errors name, such as "data".
    Raises DataError for what holds no rows.
    """
    if isinstance(data, Mapping):
        return {**data, "config": anchored(data.get("config") or {})}, {}
    if isinstance(data, str | Path):
        return {"use": "core/jsonl", "config": {"path": placed(data)}}, {}
    rows = list(_rows(data, where))
    if not rows:
        raise DataError("there are no rows.", where=where, todo="give at least one dict")
    lines = [_line(row, number, where) for number, row in enumerate(rows)]
    return {"use": "core/jsonl", "config": {"path": name}}, {name: b"".join(lines)}


def names_in(files: Mapping[str, bytes]) -> set[str]:
    """Returns the fields of the rows in such files."""
    lines = (line for content in files.values() for line in content.splitlines())
    return {name for line in lines for name in msgspec.json.decode(line)}


def anchored(node: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a mapping whose ``path`` is absolute, where there is such a file or folder.

    A path in a call of Python is relative to the current directory; one in a YAML file is relative
    to that file's directory.
    """
    path = node.get("path")
    if isinstance(path, str | Path) and Path(path).expanduser().exists():
        return {**node, "path": placed(path)}
    return dict(node)


def placed(path: str | Path) -> str:
    """Returns a path from the root on, through the run itself where it names a link ``latest``.

    A run of the same name would take the link before it reads the path.
    """
    return str(pinned(Path(path).expanduser().absolute()))


def _rows(data: Any, where: str) -> Iterator[Mapping[str, Any]]:
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a DataFrame
        data = _records(data)
    if not isinstance(data, Iterable):
        raise DataError(
            f"a value of type {type(data).__qualname__} holds no rows.",
            where=where,
            todo="give a list of dicts, a path of JSON lines, a Dataset or a DataFrame",
        )
    schema = getattr(getattr(data, "features", None), "arrow_schema", ())  # a Dataset
    narrow = converters(schema)
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} is a {type(row).__qualname__}, not a dict.",
                where=where,
                todo='a row has a prompt and what the reward needs: {"prompt": "2+3=", "sum": 5}',
            )
        yield converted(row, narrow)


def _line(row: Mapping[str, Any], number: int, where: str) -> bytes:
    try:
        return msgspec.json.encode(json_value(row)) + b"\n"
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"row {number} does not fit into JSON: {error}.",
            where=where,
            todo="give texts, numbers, bools, lists and mappings with texts as keys; of a picture "
            "its path",
        ) from error


def _records(frame: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a DataFrame with None for NaN, by which pandas marks a missing value."""
    kinds = dict(getattr(frame, "dtypes", {}))
    sizes = {name: kind.itemsize for name, kind in kinds.items() if kind.kind == "f"}
    narrow: dict[int, type[np.floating[Any]]] = {4: np.float32, 2: np.float16}
    for row in frame.to_dict(orient="records"):
        yield {name: _plain(value, narrow.get(sizes.get(name, 8))) for name, value in row.items()}


def _plain(value: Any, narrow: type[np.floating[Any]] | None) -> Any:
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return value if narrow is None else shortest(value, narrow)
