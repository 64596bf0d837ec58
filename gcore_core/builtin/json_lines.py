"""Reads rows of prompts from a JSON-lines file, one at a time.

The file is never held in memory.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from gcore_core.builtin.config import JsonLinesConfig
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import (
    json_lines,
    open_json_lines,
    open_unbuffered,
    prompt_from,
    read_again,
)
from gcore_core.runtime.files import cache_root, replacing

_OFFSET = struct.Struct("<q")


class JsonLines:
    """Reads prompts from a file with one JSON object a line. Blank lines do not count as rows.

    The first use validates every line and writes an index file. It holds the offset at which each
    row begins (int64, little endian); the last entry is the end of the last row. Later uses of the
    unchanged file use the same index. To read a row takes three reads: two offsets and the line.
    """

    def __init__(self, config: JsonLinesConfig) -> None:
        self._config = config
        self._file = open_json_lines(Path(config.path))
        index = _index_file(self._file, config)
        if not index.exists():
            _build_index(self._file, config, index)
        self._index = open_unbuffered(index)
        self._rows = os.fstat(self._index.fileno()).st_size // _OFFSET.size - 1

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        start, end = (self._offset(row), self._offset(row + 1))
        return read_again(
            self._file,
            row,
            start,
            end,
            lambda values: prompt_from(row, values, self._config),
            self._config.path,
        )

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


# -- the index of a JSON-lines file ----------------------------------------------------------------


def _index_file(file: FileIO, config: JsonLinesConfig) -> Path:
    """Returns the path of the index.

    Its name is a hash of the file's path, size and time, and of the settings that rows are
    validated by.
    """
    stat = os.fstat(file.fileno())
    key = (os.path.realpath(config.path), stat.st_size, stat.st_mtime_ns)
    checked = ("keys once", config.prompt, config.messages, config.images, config.limit)
    name = hashlib.blake2b(repr((key, checked)).encode(), digest_size=16).hexdigest()
    if config.index_dir:
        return Path(config.index_dir).expanduser() / f"{name}.offsets"
    return cache_root() / "index" / f"{name}.offsets"


def _build_index(file: FileIO, config: JsonLinesConfig, index: Path) -> None:
    """Writes the index; several processes may do it at once, each of them the same file.

    Raises ConfigError when it cannot be written.
    """
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        with replacing(index) as fresh, fresh.open("wb") as out:
            for offset in _offsets(file, config):
                out.write(_OFFSET.pack(offset))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise ConfigError(
            f"the index of {config.path} cannot be written: {error.strerror}",
            where=str(index.parent),
            todo="set data.config.index_dir or $G_CORE_CACHE to a directory that can",
        ) from error


def _offsets(file: FileIO, config: JsonLinesConfig) -> Iterator[int]:
    """Yields the offset of every line that holds a row, then the end of the last line.

    Each row is validated before its offset is yielded. At most ``config.limit`` rows are read.
    """
    end = 0
    for row, line in enumerate(json_lines(file, config.path, config.limit)):
        where = f"{config.path}, line {line.number}"
        _require_images(prompt_from(row, line.values, config, where=where), where)
        end = line.end
        yield line.start
    yield end
