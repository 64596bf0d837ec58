"""Answers for an annotator: opens the records that a shard names, stores the backend's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gcore_core.contract.annotator import Annotator
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.errors import ContractError
from gcore_core.contract.trainer import TrainRecord
from gcore_core.runtime.messages import (
    ANNOTATE,
    RELEASE_STEPS,
    AnnotateReply,
    AnnotateRequest,
    Nothing,
    ReleaseSteps,
)
from gcore_core.runtime.process.compute import Compute
from gcore_core.runtime.rpc.gathering import Gathering
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.shells.opened_records import open_records
from gcore_core.runtime.store.client import StoreWriter


class AnnotatorShell:
    """Serves one worker of a role that gives columns.

    columns: what the role gives.
    """

    def __init__(
        self,
        backend: Annotator,
        columns: Sequence[ColumnSpec],
        store: StoreWriter,
        compute: Compute,
        shards: int,
    ) -> None:
        self._backend = backend
        self._columns = {column.name: column for column in columns}
        self._store = store
        self._compute = compute
        self._reader = store.reader()
        self._shards = frozenset(range(shards))
        # A shard has one open request, so the last one of each is remembered.
        self._once = Gathering(1, keep=2 * shards)

    def register(self, service: Service) -> None:
        service.add(ANNOTATE, self.annotate)
        service.add(RELEASE_STEPS, self.release_steps)

    async def annotate(self, request: AnnotateRequest, call: Call) -> AnnotateReply:
        """Annotates records; returns where their columns lie, in the order of the request.

        The columns are one chunk, held for the request's step. A request that is repeated gets the
        same chunk.
        """

        async def act(_: list[AnnotateRequest]) -> AnnotateReply:
            records = await open_records(self._reader, request.items, request.step)
            columns = await self._compute(self._annotate, records)
            # Held for all shards, since all release at once: so they share slabs.
            ref = await self._store.put(request.step, self._shards, columns)
            return AnnotateReply(self._backend.version, ref)

        key = request.step, request.shard, request.purpose
        reply: AnnotateReply = await self._once.join(key, 0, request, act)
        return reply

    def _annotate(self, records: Sequence[TrainRecord]) -> list[Mapping[str, np.ndarray]]:
        answers = self._backend.annotate(records)
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
        if columns.keys() != self._columns.keys():
            names = [", ".join(sorted(names)) or "none" for names in (columns, self._columns)]
            return f"the columns are {names[0]}, the role gives {names[1]}"
        if double := sorted(columns.keys() & record.columns.keys()):
            return f"the record has a column {double[0]!r} already"
        actions = record.columns["action_mask"].size
        problems = (
            self._columns[name].problem_of(column, actions) for name, column in columns.items()
        )
        return next(filter(None, problems), "")

    async def release_steps(self, request: ReleaseSteps, call: Call) -> Nothing:
        self._store.release(dict.fromkeys(self._shards, (0, request.before)))
        return Nothing()
