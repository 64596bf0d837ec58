"""Reads rows of prompts from a JSON-lines file, one at a time.

The file is never held in memory.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec

from gcore_core.builtin.config import JsonLinesConfig
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import data_files_in, prompt_from, require_there, shortened

_BOM = b"\xef\xbb\xbf"
_OFFSET = struct.Struct("<q")
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)


class JsonLines:
    """Reads prompts from a file with one JSON object a line. Blank lines do not count as rows.

    The first use validates every line and writes an index file. It holds the offset at which each
    row begins (int64, little endian); the last entry is the end of the last row. Later uses of the
    unchanged file use the same index. To read a row takes three reads: two offsets and the line.
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
                f"row {row} is no longer what it was when the file was indexed: {shortened(line)}",
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


def _require_images(prompt: Prompt, where: str) -> None:
    """Raises DataError when an image of the prompt does not exist.

    Whether a file really is an image is checked only when it is opened. This check comes early.
    """
    for path in prompt.images:
        if not os.path.isfile(path):
            raise DataError(
                f"row {prompt.row} names an image that is not there: {path}",
                where=where,
                todo="paths are relative to the directory of the data",
            )


def _opened(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error


# -- the index of a JSON-lines file ----------------------------------------------------------------


def _index_file(file: FileIO, config: JsonLinesConfig) -> Path:
    """Returns the path of the index.

    Its name is a hash of the file's path, size and time, and of the settings that rows are
    validated by.
    """
    stat = os.fstat(file.fileno())
    key = (os.path.realpath(config.path), stat.st_size, stat.st_mtime_ns)
    checked = (config.prompt, config.messages, config.images, config.limit)
    name = hashlib.blake2b(repr((key, checked)).encode(), digest_size=16).hexdigest()
    if config.index_dir:
        return Path(config.index_dir).expanduser() / f"{name}.offsets"
    cache = os.environ.get("G_CORE_CACHE") or "~/.cache/g-core"
    return Path(cache).expanduser() / "index" / f"{name}.offsets"


def _build_index(file: FileIO, config: JsonLinesConfig, index: Path) -> None:
    """Writes the index to a temporary file beside it and renames that.

    So several processes may do it at once: each of them makes the same file.
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
    """Yields the offset of every line that holds a row, then the end of the last line.

    Each row is validated before its offset is yielded. At most ``config.limit`` rows are read.
    """
    position = 0
    row = 0
    with open(os.dup(file.fileno()), "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if row == config.limit:
                break
            start = position
            position += len(line)
            if number == 1 and line.startswith(_BOM):
                start = len(_BOM)
                line = line[len(_BOM) :]
            if not line.strip(b" \t\r\n"):
                continue
            where = f"{config.path}, line {number}"
            try:
                values = msgspec.json.decode(line)
            except _NOT_JSON as error:
                raise DataError(
                    f"not JSON: {shortened(line)}", where=where, why=str(error)
                ) from error
            _require_images(prompt_from(row, values, config, where=where), where)
            row += 1
            yield start
    if not row:
        raise DataError("the file holds no rows", where=config.path)
    yield position
