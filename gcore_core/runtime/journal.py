"""Appends to the files of a run that have rows, and takes rows out that are made again.

A row is one JSON object a line; most have a step. ``gcore_core.contract.run_files`` has the names
of these files and of their rows, and reads them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.runtime.files import replacing

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder(enc_hook=float)  # numbers of numpy become floats


class _Row(msgspec.Struct):
    """What is read of a row. step: None for one that belongs to no step."""

    step: int | None = None


class Journal:
    """A file to which the rows of a run are appended.

    Rows reach the operating system before ``append`` returns, behind half a row that a killed run
    may have left. Where the disk does not take them, the journal ends there; or they wait in memory
    and are written, whole and in order, as soon as there is space again.

    path: of the file.
    alarm: is told once each time rows cannot be written, and of a file that cannot be shortened.
    waits: rows wait that cannot be written.
    waiting: what is not written yet.
    """

    def __init__(
        self, path: Path, alarm: Callable[[str], None] = log.error, *, waits: bool = False
    ) -> None:
        self.path = path
        self.waiting = bytearray()
        self._alarm = alarm
        self._waits = waits
        self._has_begun = False  # what was there before ends with a whole row
        self._is_alarmed = False

    def append(self, rows: Iterable[Any]) -> None:
        """Adds rows, if the journal has not ended. Numbers that JSON does not have become null."""
        if self._is_alarmed and not self._waits:
            return
        self.waiting += b"".join(_ENCODER.encode(row) + b"\n" for row in rows)
        self.flush()

    def flush(self) -> None:
        """Writes as much of what waits as the disk takes."""
        if not self.waiting:
            return
        try:
            with self.path.open("a+b", buffering=0) as file:
                if not self._has_begun and not _ends_with_newline(file):
                    file.write(b"\n")
                self._has_begun = True
                while self.waiting:
                    # The file is unbuffered, so one write may take only a part of the bytes.
                    n_written = file.write(self.waiting)
                    del self.waiting[:n_written]
            self._is_alarmed = False
        except OSError as error:
            after = "its rows wait in memory" if self._waits else "it ends here"
            if not self._is_alarmed:
                self._alarm(f"{self.path} cannot be written: {error.strerror}; {after}.")
            self._is_alarmed = True
            if not self._waits:
                self.waiting.clear()

    def go_back(self, next_step: int, undone: Path | None = None) -> bool:
        """Moves the rows of steps that are made again to another file; returns whether any is.

        So it does with half a row. The journal is replaced last, and stays whole where that cannot
        be done; then its readers see those steps twice.

        next_step: the first step that is made again, as the rows count.
        undone: the other file; None: the one next to the journal, NAME.undone.jsonl.
        """
        try:
            return self._shorten(next_step, undone or self.path.with_suffix(".undone.jsonl"))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._alarm(f"{self.path} cannot be shortened: {error.strerror}.")
            return True

    def _shorten(self, next_step: int, undone: Path) -> bool:
        # Line by line: the trace of a long run is larger than what should lie in memory.
        with self.path.open("rb") as lines:
            if all(_stands(line, next_step) for line in lines):
                return False
            lines.seek(0)
            undone.parent.mkdir(exist_ok=True)
            with (
                replacing(self.path) as fresh,
                fresh.open("wb") as kept_file,
                undone.open("ab") as undone_file,
            ):
                for line in lines:
                    if _stands(line, next_step):
                        kept_file.write(line)
                    else:
                        undone_file.write(line.rstrip(b"\n") + b"\n")
        return True


def _stands(line: bytes, next_step: int) -> bool:
    """Returns whether a line is whole and of a step that is not made again."""
    if not line.endswith(b"\n"):
        return False  # half a line, as a killed run may leave it
    try:
        step = msgspec.json.decode(line, type=_Row).step
    except msgspec.MsgspecError:
        return False
    return step is None or step < next_step


def _ends_with_newline(file: FileIO) -> bool:
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
