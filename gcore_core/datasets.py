"""Rows of prompts from JSON-lines files, read one at a time, and what other datasets of rows in
files share with them.

No dataset is ever held in memory.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.data_config import JsonLinesConfig, RowsConfig
from gcore_core.errors import ConfigError, DataError, did_you_mean
from gcore_core.records import Prompt

_BOM = b"\xef\xbb\xbf"
_OFFSET = struct.Struct("<q")
_SHOWN_CHARACTERS = 60
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)


class JsonLines:
    """A file with one JSON object a line; blank lines do not count.

    The first use validates every line and writes where each begins into an index file (int64,
    little endian; the last entry is the end of the last line), which later uses of the unchanged
    file find again. A row costs three reads.
    """

    def __init__(self, config: JsonLinesConfig) -> None:
        path = Path(config.path)
        require_there(path)
        if path.is_dir():
            raise DataError(
                "is a directory, not a file of JSON lines",
                where=str(path),
                todo=data_files_in(path),
            )
        self._config = config
        self._file = _opened(path)
        index = _index_file(self._file, config)
        if not index.exists():
            _build_index(self._file, config, index)
        self._index = _opened(index)
        self._rows = os.fstat(self._index.fileno()).st_size // _OFFSET.size - 1

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        start, end = (self._offset(row), self._offset(row + 1))
        line = os.pread(self._file.fileno(), end - start, start)
        try:
            return prompt_from(row, msgspec.json.decode(line), self._config)
        except (*_NOT_JSON, DataError) as error:
            raise DataError(
                f"row {row} is no longer what it was when the file was indexed: {_shortened(line)}",
                where=self._config.path,
                todo="do not write into a file that a run is reading; start the run again",
            ) from error

    def close(self) -> None:
        self._file.close()
        self._index.close()

    def _offset(self, row: int) -> int:
        # Not a memory map: its pages would count as memory of every worker that reads.
        raw = os.pread(self._index.fileno(), _OFFSET.size, row * _OFFSET.size)
        return int(_OFFSET.unpack(raw)[0])


def prompt_from(row: int, values: Any, config: RowsConfig, *, where: str = "") -> Prompt:
    """The row as a prompt; DataError, at ``where``, when it is no object or its prompt is not there
    or no prompt.
    """
    where = where or config.path
    if not isinstance(values, dict):
        raise DataError(
            f"expected an object, found {_shortened(msgspec.json.encode(values))}", where=where
        )
    fields = dict(values)
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
    if config.messages:
        if not _is_chat(value):
            raise DataError(
                (
                    f"field {name!r} is not a list of chat messages: "
                    f"{_shortened(repr(value).encode())}"
                ),
                where=where,
                why='each message is an object with "role" and "content"',
            )
        shown = _image_parts(value)
        if shown != len(images):
            raise DataError(
                (
                    f"field {name!r} has {shown} parts of type image, and the row names "
                    f"{len(images)} images"
                ),
                where=where,
                todo=""
                if config.images
                else "set data.config.images to the field that holds their paths",
            )
        return Prompt(row=row, messages=value, images=images, fields=fields)
    if not isinstance(value, str):
        todo = f"for chat messages set data.config.messages: {name}" if _is_chat(value) else ""
        raise DataError(
            f"field {name!r} is {_shortened(repr(value).encode())}, not a text",
            where=where,
            todo=todo,
        )
    return Prompt(row=row, text=value, images=images, fields=fields)


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
    """Absolute paths of the images that a row names."""
    if not isinstance(value, list | None) or not all(isinstance(name, str) for name in value or ()):
        told = _shortened(repr(value).encode())
        raise DataError(f"field {config.images!r} is {told}, not a list of paths", where=where)
    data = Path(config.path).absolute()
    folder = data if data.is_dir() else data.parent
    return [str(folder / name) for name in value or ()]


def _require_images(prompt: Prompt, where: str) -> None:
    """Whoever opens them says whether they are images; this is early."""
    for path in prompt.images:
        if not os.path.isfile(path):
            raise DataError(
                f"row {prompt.row} names an image that is not there: {path}",
                where=where,
                todo="paths are relative to the directory of the data",
            )


def require_there(path: Path) -> None:
    """DataError when there is no such file or directory; it names a neighbour that may have been
    meant.
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
    """A sentence that lists some of them, for errors."""
    names = sorted(
        p.name for p in folder.iterdir() if p.suffix in (".jsonl", ".json", ".parquet", ".arrow")
    )
    return f"data files in {folder}: {', '.join(names[:8]) or 'none'}"


def _opened(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _shortened(text: bytes) -> str:
    shown = text.decode("utf-8", "replace").strip()
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."


# -- the index of a JSON-lines file ----------------------------------------------------------------


def _index_file(file: FileIO, config: JsonLinesConfig) -> Path:
    """Where the index is: named by the file, its size and time, and by all that was validated."""
    stat = os.fstat(file.fileno())
    key = (os.path.realpath(config.path), stat.st_size, stat.st_mtime_ns)
    checked = (config.prompt, config.messages, config.images, config.limit)
    name = hashlib.blake2b(repr((key, checked)).encode(), digest_size=16).hexdigest()
    if config.index_dir:
        return Path(config.index_dir).expanduser() / f"{name}.offsets"
    cache = os.environ.get("G_CORE_CACHE") or "~/.cache/g-core"
    return Path(cache).expanduser() / "index" / f"{name}.offsets"


def _build_index(file: FileIO, config: JsonLinesConfig, index: Path) -> None:
    """Writes beside and renames, so several processes may do it at once: each makes the same
    file.
    """
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=index.parent, prefix=index.stem)
    except OSError as error:
        raise ConfigError(
            f"the index of {config.path} cannot be written: {error.strerror}",
            where=str(index.parent),
            todo="set data.config.index_dir or $G_CORE_CACHE to a directory that can",
        ) from error
    try:
        with open(descriptor, "wb") as out:
            for offset in _offsets(file, config):
                out.write(_OFFSET.pack(offset))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, index)
    except BaseException:
        os.unlink(temporary)
        raise


def _offsets(file: FileIO, config: JsonLinesConfig) -> Iterator[int]:
    """Offset of every line that holds a row, then the end of the last one; validates each."""
    position, row = 0, 0
    with open(os.dup(file.fileno()), "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if row == config.limit:
                break
            start, position = position, position + len(line)
            if number == 1 and line.startswith(_BOM):
                start, line = len(_BOM), line[len(_BOM) :]
            if not line.strip(b" \t\r\n"):
                continue
            where = f"{config.path}, line {number}"
            try:
                values = msgspec.json.decode(line)
            except _NOT_JSON as error:
                raise DataError(
                    f"not JSON: {_shortened(line)}", where=where, why=str(error)
                ) from error
            _require_images(prompt_from(row, values, config, where=where), where)
            row += 1
            yield start
    if not row:
        raise DataError("is empty: it holds no rows", where=config.path)
    yield position
