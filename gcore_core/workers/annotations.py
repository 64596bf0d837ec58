"""Answers for an annotator: checks and stores the columns that its backend gives of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gcore_core.contract.annotator import Annotates, Annotator
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.errors import ContractError
from gcore_core.contract.records import Ref
from gcore_core.contract.trainer import TrainRecord
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.messages import (
    ANNOTATE,
    RELEASE_STEPS,
    AnnotateReply,
    AnnotateRequest,
    Nothing,
    ReleaseSteps,
)
from gcore_core.store.client import StoreWriter
from gcore_core.wire.gathering import Gathering
from gcore_core.wire.service import Call, Service
from gcore_core.workers.opened_records import open_records

Answers = Sequence[Mapping[str, np.ndarray]]


class Annotations:
    """Checks and stores the columns that one worker of a role gives.

    columns: name -> its description, of those that the role gives.
    reader: opens records on this node.
    shards: number of controllers.
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


class AnnotatorShell:
    """Serves one worker of a role that gives columns."""

    def __init__(
        self, backend: Annotator, annotations: Annotations, compute: Compute, shards: int
    ) -> None:
        self._backend = backend
        self._annotations = annotations
        self._compute = compute
        # A shard has one open request at a time; the last two of each shard are remembered.
        self._requests = Gathering(1, keep=2 * shards)

    def register(self, service: Service) -> None:
        service.add(ANNOTATE, self.annotate)
        service.add(RELEASE_STEPS, self.release_steps)

    async def annotate(self, request: AnnotateRequest, call: Call) -> AnnotateReply:
        """Annotates records; returns where their columns lie, in the order of the request.

        The columns are one chunk, held for the request's step. A request that is repeated gets the
        same chunk.
        """

        async def act(_: list[AnnotateRequest]) -> AnnotateReply:
            annotations = self._annotations
            records = await open_records(annotations.reader, request.items, request.step)
            columns = await self._compute(annotations.of, self._backend, records)
            return AnnotateReply(
                self._backend.version, await annotations.put(request.step, columns)
            )

        key = request.step, request.shard, request.purpose
        reply: AnnotateReply = await self._requests.run_once(key, request, act)
        return reply

    async def release_steps(self, request: ReleaseSteps, call: Call) -> Nothing:
        self._annotations.release(request)
        return Nothing()
