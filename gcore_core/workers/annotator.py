"""Answers for an annotator: opens the records that a shard names, stores the backend's columns."""

from __future__ import annotations

from gcore_core.contract.annotator import Annotator
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.messages import (
    ANNOTATE,
    RELEASE_STEPS,
    AnnotateReply,
    AnnotateRequest,
    Nothing,
    ReleaseSteps,
)
from gcore_core.wire.gathering import Gathering
from gcore_core.wire.service import Call, Service
from gcore_core.workers.annotations import Annotations
from gcore_core.workers.opened_records import open_records


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
