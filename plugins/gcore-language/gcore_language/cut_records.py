"""Cuts a step's records into the rows that a trainer trains on; see ``gcore_language.sequences``.

A row is treated as a record of its own. The record that it was cut from is its *owner*: the row has
the owner's advantage, and what is computed of the row goes back to the owner. In a mean over
records each row of an owner counts 1 / (their number): the column ``rows`` of a batch has by how
many to divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np

from gcore_core.contract.columns import SEQUENCES
from gcore_core.contract.trainer import StartLogprobs, TrainRecord
from gcore_language.sequences import Row, join, sampled_alone, trained_rows

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class CutRecords:
    """Holds records and their rows, in order.

    given: the records as they came.
    rows: the rows of all records, in order, each as a record of its own; ``given`` itself where no
        record was cut.
    owners: int64[rows], the place of each row's owner in ``given``.
    cuts: of each record its rows, as ``gcore_language.sequences`` makes them.
    """

    given: Sequence[TrainRecord]
    rows: Sequence[TrainRecord]
    owners: np.ndarray
    cuts: Sequence[Sequence[Row]]

    @classmethod
    def of(cls, records: Sequence[TrainRecord]) -> Self:
        """Cuts records into rows.

        Raises DataError where a record's column ``sequences`` cannot be.
        """
        cuts = [trained_rows(record.columns) for record in records]
        pairs = [(record, row) for record, own in zip(records, cuts, strict=True) for row in own]
        rows: Sequence[TrainRecord] = records
        if any(row.columns is not record.columns for record, row in pairs):
            rows = [replace(record, columns=row.columns) for record, row in pairs]
        owners = np.repeat(np.arange(len(records)), [len(own) for own in cuts])
        return cls(given=records, rows=rows, owners=owners, cuts=cuts)

    @property
    def has_several(self) -> bool:
        """Whether a record has more than one row."""
        return len(self.owners) > len(self.given)

    def counts(self) -> np.ndarray:
        """Returns for each row how many rows its owner has, int64[rows]."""
        counts: np.ndarray = np.bincount(self.owners, minlength=len(self.given))[self.owners]
        return counts

    def spread(self, numbers: np.ndarray) -> np.ndarray:
        """Returns for each row the number of its owner: an array [rows], of one [records]."""
        return numbers[self.owners] if self.has_several else numbers

    def cut(self, columns: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns each row's part of columns with a value for each action.

        columns: [A, ...] of each record.
        """
        return [
            column[row.begin : row.end]
            for column, own in zip(columns, self.cuts, strict=True)
            for row in own
        ]

    def join(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns one column for each record of what was computed of its rows.

        values: [A, ...] of each row.
        """
        parts = self.of_records(values)
        return [
            join(record.columns, own, part)
            for record, own, part in zip(self.given, self.cuts, parts, strict=True)
        ]

    def of_records(self, values: Sequence[Value]) -> list[Sequence[Value]]:
        """Returns for each record the values of its rows.

        values: one for each row.
        """
        ends = np.cumsum([len(own) for own in self.cuts]).tolist()
        begins = [0, *ends[:-1]]
        return [values[begin:end] for begin, end in zip(begins, ends, strict=False)]

    def join_start(self, values: Sequence[StartLogprobs | None]) -> list[StartLogprobs | None]:
        """Returns for each record the log-probs that its rows had before the first update.

        It is None for a record of which a row has none.
        """
        return [
            self._start_of(place, [value for value in part if value is not None])
            for place, part in enumerate(self.of_records(values))
        ]

    def _start_of(self, place: int, values: Sequence[StartLogprobs]) -> StartLogprobs | None:
        columns, rows = self.given[place].columns, self.cuts[place]
        if len(values) < len(rows):
            return None
        if rows[0].columns is columns and SEQUENCES not in columns:
            return values[0]
        logp = join(columns, rows, [value.logp for value in values])
        entropies = [value.entropy for value in values if value.entropy is not None]
        entropy = join(columns, rows, entropies) if entropies else None
        return StartLogprobs(
            logp=sampled_alone(columns, logp),
            entropy=None if entropy is None else sampled_alone(columns, entropy),
        )
