"""Follows the rows of a run's metrics without reading any of them twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gcore_core.contract.run_files import METRICS

_MARK = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class NewRows:
    """Gives the lines that were written since it was asked last.

    A run that goes back to a checkpoint replaces its file. Then the whole page is out of date,
    which ``is_replaced`` says.

    since: ``mark`` behind the last line that a page has had whose connection was lost. Without one,
        what is there already is a part of the page.
    """

    def __init__(self, run_dir: Path, since: str = "") -> None:
        self._path = run_dir / METRICS
        self._place = 0
        self._inode = 0
        self.is_replaced = False
        if _MARK.fullmatch(since):
            self._inode, self._place = map(int, since.split("-"))
            return
        for _ in self.read():
            pass

    @property
    def mark(self) -> str:
        """Names the place behind the last line that was given."""
        return f"{self._inode}-{self._place}"

    def read(self) -> Iterator[bytes]:
        """Yields the whole lines that are new, without their ends."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return
        self.is_replaced = bool(self._inode) and (
            status.st_ino != self._inode or status.st_size < self._place
        )
        if self.is_replaced:
            self._place = 0
        self._inode = status.st_ino
        if status.st_size == self._place:
            return
        with self._path.open("rb") as file:
            file.seek(max(0, self._place - 1))
            if self._place and file.read(1) != b"\n":
                # The last row that was given has got a field more at its end meanwhile.
                rest = file.readline()
                if not rest.endswith(b"\n"):
                    return
                self._place += len(rest)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._place += len(line)
                yield line.rstrip(b"\n")
