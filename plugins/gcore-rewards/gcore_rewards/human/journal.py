"""Appends JSON lines to files so that none is lost, and reads them while others write.

A line counts once its newline is on the disk. What a killed process left behind the last newline
was never confirmed to anybody, so the next writer cuts it off and readers leave it out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from gcore_core.contract.errors import ConfigError, DataError

T = TypeVar("T")
_BLOCK = 1 << 16


class Journal:
    """A file of JSON lines that one process writes, as long as it lives.

    path: the file; it and its directory are made, readable by its owner alone.
    todo: what a reader of the error can do when another process writes to the file.

    Raises ConfigError when another process has the file, or it cannot be written.
    """

    def __init__(self, path: Path, todo: str) -> None:
        self.path = path
        try:
            self._file = _open(path)
        except OSError as error:
            raise ConfigError(
                "the file cannot be written.", where=str(path), why=f"the system says: {error}"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise ConfigError(
                "another process writes to this file.", where=str(path), todo=todo
            ) from None
        _cut_half_line(self._file)

    def append(self, value: Any) -> None:
        """Writes one line, and returns when it is on the disk.

        Raises OSError when it is not; the file is then as before.
        """
        _append(self._file, [value])

    def close(self) -> None:
        os.close(self._file)


def append_shared(path: Path, values: Iterable[Any]) -> None:
    """Writes lines to a file that several processes write; returns when they are on the disk."""
    file = _open(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        _cut_half_line(file)
        _append(file, values)
    finally:
        os.close(file)


class Tail(Generic[T]):
    """Reads the lines that were appended to a file since it was last asked.

    path: the file, which need not be there yet.
    kind: the type of a line, as ``msgspec`` decodes it.
    """

    def __init__(self, path: Path, kind: Any) -> None:
        self._path = path
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._offset = 0
        self._number = 0

    def new(self) -> Iterator[T]:
        """Yields the new whole lines.

        Raises DataError, with its number, for one that is none, and where what was read before is
        no longer there. Asked again, it begins with that line.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._offset - 1))
                content = file.read()
        except FileNotFoundError:
            content = b""
        if self._offset:
            if not content.startswith(b"\n"):
                raise DataError(
                    "the file was shortened or written anew while it was read.",
                    where=str(self._path),
                    why="lines are only appended to it",
                    todo="change it only while nothing reads it; then start again what does",
                )
            content = content[1:]
        for text in content.split(b"\n")[:-1]:
            try:
                line = self._decoder.decode(text)
            except msgspec.MsgspecError as error:
                raise DataError(
                    "a line cannot be read.",
                    where=f"{self._path}:{self._number + 1}",
                    why=str(error),
                    todo="mend the line, or take it out",
                ) from None
            self._offset += len(text) + 1
            self._number += 1
            yield line


def _open(path: Path) -> int:
    """Opens a file for reading and appending, and makes it where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    file = os.open(path, flags | os.O_CREAT, 0o600)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # else a crash of the machine may lose the new file's name
    finally:
        os.close(directory)
    return file


def _append(file: int, values: Iterable[Any]) -> None:
    """Writes all lines or none."""
    content = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
    size = os.fstat(file).st_size
    try:
        written = 0
        while written < len(content):
            written += os.write(file, content[written:])
        os.fsync(file)
    except OSError:
        os.ftruncate(file, size)  # such as of a full disk: half a line would spoil the next one
        raise


def _cut_half_line(file: int) -> None:
    """Cuts off what stands behind the last newline."""
    size = end = os.fstat(file).st_size
    while end:
        start = max(0, end - _BLOCK)
        at = os.pread(file, end - start, start).rfind(b"\n")
        if at >= 0:
            end = start + at + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
