"""Datasets of rows with answers, from a file with one JSON object a line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gcore_algorithms.offline.config import RowsFileConfig
from gcore_algorithms.offline.rows import Kind, example_of, prompt_of
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import fields_of, json_lines, open_json_lines, read_again


class AnswerRows:
    """Gives the rows of a file. Blank lines are no rows.

    Every row is validated when the file is opened, and decoded again when it is asked for. Of the
    file only the offsets of its rows are held, int64[rows].

    kind: which formats its rows may have.
    """

    kind: ClassVar[Kind]

    def __init__(self, config: RowsFileConfig) -> None:
        self._name = config.path
        self._file = open_json_lines(Path(config.path))
        self._spans = np.array(self._validated(config.limit), np.int64)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self._spans):
            raise IndexError(f"row {row} of {len(self._spans)}")
        start, end = self._spans[row].tolist()
        make = partial(self._prompt, row, where=f"row {row}")
        return read_again(self._file, row, start, end, make, self._name)

    def close(self) -> None:
        self._file.close()

    def _validated(self, limit: int | None) -> list[tuple[int, int]]:
        """Returns where each row begins and ends, in bytes. Raises DataError for a wrong row."""
        spans: list[tuple[int, int]] = []
        for row, line in enumerate(json_lines(self._file, self._name, limit)):
            where = f"{self._name}, line {line.number} (row {row})"
            self._prompt(row, line.values, where)
            spans.append((line.start, line.end))
        return spans

    def _prompt(self, row: int, values: Any, where: str) -> Prompt:
        return prompt_of(row, example_of(fields_of(values, where), self.kind, where), {})


class ChatRows(AnswerRows):
    """Rows with an answer, for supervised fine-tuning."""

    kind = "chat"


class PairRows(AnswerRows):
    """Rows with a chosen and a rejected answer."""

    kind = "pairs"


class ScoredRows(AnswerRows):
    """Rows with an answer and its score."""

    kind = "scores"
