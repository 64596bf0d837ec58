"""Checks the columns that a role's backend gives of records, and stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gcore_core.contract.annotator import Annotates
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.errors import ContractError
from gcore_core.contract.records import Ref
from gcore_core.contract.trainer import TrainRecord
from gcore_core.runtime.messages import ReleaseSteps
from gcore_core.store.client import StoreWriter

Answers = Sequence[Mapping[str, np.ndarray]]


class Annotations:
    """Checks and stores the columns that one worker of a role gives.

    columns: name -> its description, of those that the role gives.
    reader: opens records on this node.
    shards: how many controllers there are.
    """

    def __init__(self, columns: Sequence[ColumnSpec], store: StoreWriter, shards: int) -> None:
        self.columns = {column.name: column for column in columns}
        self.reader = store.reader()
        self._store = store
        self._shards = frozenset(range(shards))

    def of(self, backend: Annotates, records: Sequence[TrainRecord]) -> Answers:
        """Returns what the backend says of the records.

        Raises ContractError where that breaks the contract of ``Annotates.annotate``.
        """
        answers = backend.annotate(records)
        if len(answers) != len(records):
            raise ContractError(
                f"{len(answers)} answers for {len(records)} records", where="annotate"
            )
        for record, columns in zip(records, answers, strict=True):
            if problem := self._problem(record, columns):
                where = f"annotate, ordinal {record.ordinal}, sample {record.sample}"
                raise ContractError(problem, where=where)
        return answers

    def _problem(self, record: TrainRecord, columns: Mapping[str, np.ndarray]) -> str:
        """Returns what is wrong with the columns of one record; empty when nothing is."""
        if columns.keys() != self.columns.keys():
            names = [", ".join(sorted(names)) or "none" for names in (columns, self.columns)]
            return f"the columns are {names[0]}, the role gives {names[1]}"
        if double := sorted(columns.keys() & record.columns.keys()):
            return f"the record has a column {double[0]!r} already"
        actions = record.columns["action_mask"].size
        problems = (
            self.columns[name].problem_of(column, actions) for name, column in columns.items()
        )
        return next(filter(None, problems), "")

    async def put(self, step: int, answers: Answers) -> Ref:
        """Stores columns as one chunk, held for the step.

        It is held for all shards, since all release at once: so they share slabs.
        """
        return await self._store.put(step, self._shards, answers)

    def release(self, request: ReleaseSteps) -> None:
        """Lets the columns of earlier steps go."""
        self._store.release(dict.fromkeys(self._shards, (0, request.before)))
