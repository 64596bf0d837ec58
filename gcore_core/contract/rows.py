"""Makes prompts from rows in files: what every dataset of files has in common."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gcore_core.contract.errors import ConfigError, DataError, did_you_mean
from gcore_core.contract.records import Prompt
from gcore_core.contract.traits import Traits

_SHOWN_CHARACTERS = 60
_BOM = b"\xef\xbb\xbf"
_JSON_SPACES = b" \t\r\n"
#: A text may have more brackets than the reader follows.
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """Holds the settings that every dataset of rows in files has.

    Fields of a row that are not the prompt go along with it.
    """

    path: str
    """File to read, or a directory where the format has one; relative to the YAML's directory."""
    prompt: str = "prompt"
    """Name of the field that holds the prompt: a text, or chat messages [{role, content}, ...]."""
    messages: str | None = None
    """Name of the field that holds the prompt, in the place of ``prompt``, where every row's is to
    be chat messages. Empty: each row's prompt is what it is.
    """
    images: str | None = None
    """Name of the field that holds the paths of the prompt's images, [path, ...], relative to the
    directory of the data. Empty: prompts have no images.
    """
    limit: int | None = None
    """Number of rows to use, from the first on; at least 1. Empty: all rows."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"must be at least 1, is {self.limit}", where="limit")

    def traits(self) -> Traits:
        return Traits(shows_images=self.images is not None)


def prompt_from(row: int, values: Any, config: RowsConfig, *, where: str = "") -> Prompt:
    """Makes a prompt of a row.

    Raises DataError when the row is no object, or has no prompt of the right form.

    row: its number in the dataset.
    values: the row as it was read.
    where: what errors name; "" for the path of the data.
    """
    where = where or config.path
    fields = fields_of(values, where)
    images = _images(fields.pop(config.images, None), config, where) if config.images else []
    name = config.messages or config.prompt
    if name not in fields:
        key = "messages" if config.messages else "prompt"
        raise DataError(
            f"no field {name!r}{did_you_mean(name, list(fields))}",
            where=where,
            why=f"it has: {', '.join(fields) or 'none'}",
            todo=f"set data.config.{key} to the field that holds the prompt",
        )
    value = fields.pop(name)
    if config.messages or isinstance(value, list):
        if not _is_chat(value):
            raise DataError(
                (
                    f"field {name!r} is not a list of chat messages: "
                    f"{shortened(repr(value).encode())}"
                ),
                where=where,
                why='each message is an object with "role" and "content"',
            )
        image_parts = _image_parts(value)
        if image_parts != len(images):
            raise DataError(
                (
                    f"field {name!r} has {image_parts} parts of type image, and the row names "
                    f"{len(images)} images"
                ),
                where=where,
                todo=""
                if config.images
                else "set data.config.images to the field that holds their paths",
            )
        return Prompt(row=row, messages=value, images=images, fields=fields)
    if not isinstance(value, str):
        raise DataError(
            f"field {name!r} is {shortened(repr(value).encode())}, neither a text nor a chat",
            where=where,
        )
    return Prompt(row=row, text=value, images=images, fields=fields)


def fields_of(values: Any, where: str) -> dict[str, Any]:
    """Returns a copy of the fields of a row as it was read. Raises DataError for no object."""
    if not isinstance(values, dict):
        raise DataError(
            f"expected an object, found {shortened(msgspec.json.encode(values))}", where=where
        )
    return dict(values)


def same_value(value: Any, other: Any) -> bool:
    """Returns whether two values of rows say the same, as JSON does.

    3.0 is 3, and true is no number. Next to a value of another kind a text is what it says as
    JSON: "3" is 3.0 and "true", or "True", is true, but "007" is not 7, and two texts are the same
    by their letters.
    """
    if isinstance(value, str) != isinstance(other, str):
        text, value = (value, other) if isinstance(value, str) else (other, value)
        try:
            other = msgspec.json.decode(text.lower() if isinstance(value, bool) else text)
        except _NOT_JSON:
            return False
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same_value, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same_value(value[k], other[k]) for k in value)
    return bool(value == other)


def is_meant(fields: Mapping[str, Any], when: Mapping[str, Any]) -> bool:
    """Returns whether a row has, of every field that ``when`` names, a value that is listed there.

    Texts in quotes and numbers without are told apart in few files, so "3" is 3 here.

    when: field -> a value, or a list of them; empty: every row is meant.
    """
    return all(
        any(same_value(fields.get(name), value) for value in listed(values))
        for name, values in when.items()
    )


def listed(values: Any) -> list[Any]:
    """Makes a list of a condition of ``when``, which may be one value or a list of them."""
    return values if isinstance(values, list) else [values]


def spread(rows: int, most: int) -> Iterable[int]:
    """Returns numbers of rows: all, or ``most`` of them evenly from the first to the last.

    rows: how many there are.
    most: at least 2.
    """
    if rows <= most:
        return range(rows)
    return (place * (rows - 1) // (most - 1) for place in range(most))


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn
            for turn in value
        )
    )


def _image_parts(turns: list[dict[str, Any]]) -> int:
    parts = [
        part for turn in turns if isinstance(turn["content"], list) for part in turn["content"]
    ]
    return sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def _images(value: Any, config: RowsConfig, where: str) -> list[str]:
    """Returns the absolute paths of the images that a row names."""
    if not isinstance(value, list | None) or not all(isinstance(name, str) for name in value or ()):
        content = shortened(repr(value).encode())
        raise DataError(f"field {config.images!r} is {content}, not a list of paths", where=where)
    data = Path(config.path).absolute()
    folder = data if data.is_dir() else data.parent
    return [str(folder / name) for name in value or ()]


def require_there(path: Path) -> None:
    """Raises DataError when there is no such file or directory.

    The error names a neighbour that may have been meant.
    """
    if path.exists():
        return
    folder = path.parent
    if not folder.is_dir():
        raise DataError(
            "no such file", where=str(path), why=f"there is no directory {folder} either"
        )
    names = sorted(entry.name for entry in folder.iterdir())
    why = "" if did_you_mean(path.name, names) else data_files_in(folder)
    raise DataError(f"no such file{did_you_mean(path.name, names)}", where=str(path), why=why)


def data_files_in(folder: Path) -> str:
    """Returns a sentence for errors that lists some of the data files in a folder."""
    names = sorted(
        p.name for p in folder.iterdir() if p.suffix in (".jsonl", ".json", ".parquet", ".arrow")
    )
    return f"data files in {folder}: {', '.join(names[:8]) or 'none'}"


def shortened(text: bytes) -> str:
    line = text.decode("utf-8", "replace").strip()
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


# -- files with one JSON object a line -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JsonLine:
    """Holds a row of a file of JSON lines.

    number: of the line, counted from 1.
    start, end: where the line begins and ends, in bytes; a byte order mark does not belong to it.
    values: what the line says.
    """

    number: int
    start: int
    end: int
    values: Any


def open_json_lines(path: Path) -> FileIO:
    """Opens a file of JSON lines. Raises DataError when there is none, or it cannot be read."""
    require_there(path)
    if path.is_dir():
        raise DataError(
            "is a directory, not a file of JSON lines",
            where=str(path),
            todo=data_files_in(path),
        )
    return open_unbuffered(path)


def open_unbuffered(path: Path) -> FileIO:
    """Opens a file for reads at offsets. Raises DataError when it cannot be read."""
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error


def json_lines(file: FileIO, name: str, limit: int | None) -> Iterator[JsonLine]:
    """Yields the rows of a file that has just been opened. Blank lines are no rows.

    Raises DataError for a line that is not JSON, or has a key twice in one object, and for a file
    without rows.

    name: of the file, for errors.
    limit: most rows that are yielded; lines behind them are not looked at.
    """
    position = 0
    rows = 0
    with open(os.dup(file.fileno()), "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if rows == limit:
                break
            start = position
            position += len(line)
            if number == 1 and line.startswith(_BOM):
                start = len(_BOM)
                line = line[len(_BOM) :]
            if not line.strip(_JSON_SPACES):
                continue
            where = f"{name}, line {number}"
            try:
                values = msgspec.json.decode(line)
                repeated = repeated_key(line)
            except _NOT_JSON as error:
                raise DataError(
                    f"not JSON: {shortened(line)}", where=where, why=str(error)
                ) from error
            if repeated is not None:
                raise key_twice(rows, repeated, where)
            rows += 1
            yield JsonLine(number=number, start=start, end=position, values=values)
    if not rows:
        raise DataError("the file holds no rows", where=name)


def key_twice(row: int, key: str, where: str) -> DataError:
    """Returns the error for a row with a key that stands twice in one object."""
    return DataError(
        f"row {row} has the key {key!r} twice in one object",
        where=where,
        why="which of the two values is meant cannot be known",
        todo="leave one of them, or drop the row",
    )


def read_again(
    file: FileIO, row: int, start: int, end: int, make: Callable[[Any], _Made], name: str
) -> _Made:
    """Makes the prompt of a row, or whatever else is made of it, that was valid before.

    Raises DataError when it is valid no more: somebody has written into the file.

    start, end: as ``json_lines`` gave them.
    make: makes it of what the line says.
    name: of the file, for errors.
    """
    line = os.pread(file.fileno(), end - start, start)
    try:
        return make(msgspec.json.decode(line))
    except (*_NOT_JSON, DataError) as error:
        raise DataError(
            f"row {row} is no longer what it was when the file was indexed: {shortened(line)}",
            where=name,
            todo="do not write into a file that a run is reading; start the run again",
        ) from error


class _Repeated(Exception):
    """A key stands twice in one object."""


def repeated_key(text: bytes | str) -> str | None:
    """Returns a key that an object of a JSON text has twice, at any depth; None: there is none.

    Readers of JSON take the last value of it and say nothing. text: valid JSON.
    """

    def pairs(items: list[tuple[str, Any]]) -> None:
        names = {name for name, _ in items}
        if len(names) < len(items):
            written = [name for name, _ in items]
            raise _Repeated(next(name for name in written if written.count(name) > 1))

    try:
        # No number is made: one of many digits would be refused.
        json.loads(text, object_pairs_hook=pairs, parse_int=len, parse_float=len)
    except _Repeated as error:
        return str(error)
    return None
