"""Datasets of rows with answers, from a file with one JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import data_files_in, require_there, shortened
from gcore_offline.config import RowsFileConfig
from gcore_offline.rows import Kind, example_of, prompt_of

_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)
_BOM = b"\xef\xbb\xbf"


class AnswerRows:
    """Gives the rows of a file. Blank lines are no rows.

    Every row is validated when the file is opened, and decoded again when it is asked for. Of the
    file only the offsets of its rows are held, int64[rows].

    kind: which formats its rows may have.
    """

    kind: ClassVar[Kind]

    def __init__(self, config: RowsFileConfig) -> None:
        path = Path(config.path)
        require_there(path)
        if path.is_dir():
            raise DataError(
                "is a directory, not a file of JSON lines",
                where=str(path),
                todo=data_files_in(path),
            )
        self._path = path
        self._spans = np.array(self._validated(config.limit), np.int64).reshape(-1, 2)
        if not len(self._spans):
            raise DataError("the file holds no rows", where=str(path))
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self._spans):
            raise IndexError(f"row {row} of {len(self._spans)}")
        start, end = self._spans[row].tolist()
        self._file.seek(start)
        line = self._file.read(end - start)
        try:
            return self._prompt(row, msgspec.json.decode(line), f"row {row}")
        except (*_NOT_JSON, DataError) as error:
            raise DataError(
                f"row {row} is no longer what it was when the file was opened: {shortened(line)}",
                where=str(self._path),
                todo="do not write into a file that a run is reading; start the run again",
            ) from error

    def close(self) -> None:
        self._file.close()

    def _validated(self, limit: int | None) -> list[tuple[int, int]]:
        """Returns where each row begins and ends, in bytes. Raises DataError for a wrong row."""
        spans: list[tuple[int, int]] = []
        position = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if len(spans) == limit:
                    break
                start = position
                position += len(line)
                if number == 1 and line.startswith(_BOM):
                    start += len(_BOM)
                    line = line[len(_BOM) :]
                if not line.strip():
                    continue
                where = f"{self._path}, line {number} (row {len(spans)})"
                try:
                    values = msgspec.json.decode(line)
                except _NOT_JSON as error:
                    raise DataError(
                        f"not JSON: {shortened(line)}", where=where, why=str(error)
                    ) from error
                self._prompt(len(spans), values, where)
                spans.append((start, position))
        return spans

    def _prompt(self, row: int, values: Any, where: str) -> Prompt:
        if not isinstance(values, dict):
            found = shortened(msgspec.json.encode(values))
            raise DataError(f"expected an object, found {found}", where=where)
        return prompt_of(row, example_of(values, self.kind, where), {})


class ChatRows(AnswerRows):
    """Rows with an answer, for supervised fine-tuning."""

    kind = "chat"


class PairRows(AnswerRows):
    """Rows with a chosen and a rejected answer."""

    kind = "pairs"


class ScoredRows(AnswerRows):
    """Rows with an answer and its score."""

    kind = "scores"
