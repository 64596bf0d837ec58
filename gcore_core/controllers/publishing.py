"""Weights to every generator, verified, before the next step begins."""

from __future__ import annotations

import asyncio
from functools import partial

from gcore_core.contract.errors import ContractError, WeightMismatch, WorkerDied
from gcore_core.contract.weight_transfer import SHM
from gcore_core.controllers.annotating import release_annotations
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.runtime.messages import (
    PUBLISHED,
    PUSH_BEGIN,
    PUSH_PULL,
    SAVE_PRETRAINED,
    BeginPush,
    Published,
    PullWeights,
    SaveWeights,
)
from gcore_core.runtime.rpc.retry import PUSHES, insist


class Publishing:
    """Pushes weights from the trainers to every generator that is awake.

    The lead does it; the other shards wait for it, which is also the barrier at the end of a step.
    No sample may be in flight meanwhile: a program that generates ahead drains its window before.
    """

    def __init__(
        self, context: ControllerContext, config: SyncConfig, placement: PlacementShard
    ) -> None:
        self._context = context
        self._config = config
        self._placement = placement

    async def publish(self, version: int, release_before: int) -> bool:
        """Pushes what the trainers hold, which is ``version``. Returns, the same for all shards,
        whether the run is to end here.

        release_before: records of earlier steps have been trained on, and every sample of them
            shown; their memory is given back.
        """
        if self._context.agree.lead:
            await self._push_until_whole(version, release_before)
        return await self._context.agree.barrier("published", self._context.stopping.is_set())

    async def _push_until_whole(self, version: int, release_before: int) -> None:
        """Begins anew when a replica is lost in the middle of a push: the one that takes its place
        asks from the start, and finds the first buckets overwritten (WeightMismatch).
        """
        lost = (WorkerDied, ContractError, WeightMismatch)
        await PUSHES.run(partial(self._push_once, version, release_before), lost)
        await release_annotations(self._context, release_before)
        await insist(self._context.supervisor, PUBLISHED, Published(version))

    async def _push_once(self, version: int, release_before: int, attempt: int) -> None:
        ranks = self._context.trainers
        replicas = self._placement.replicas
        configured = self._config.push_transport
        # Shared memory needs nothing of anybody's device.
        transport = SHM if attempt and configured == "auto" else configured
        request = BeginPush(
            version, self._config.push_bucket_bytes, len(replicas), attempt, transport
        )

        def pull(receiver: int) -> PullWeights:
            return PullWeights(version, receiver, ranks[0].name, attempt, release_before)

        await insist(ranks[0], PUSH_BEGIN, request)
        await asyncio.gather(
            *(insist(rank, PUSH_BEGIN, request) for rank in ranks[1:]),
            *(insist(replica, PUSH_PULL, pull(i)) for i, replica in enumerate(replicas)),
        )

    async def save(self) -> None:
        """The final weights in Hugging Face layout. Every rank takes part, since it may need
        collectives.
        """
        agree = self._context.agree
        output = self._context.facts.output
        if agree.lead and output:
            ranks = self._context.trainers
            request = SaveWeights(output)
            await asyncio.gather(*(insist(r, SAVE_PRETRAINED, request) for r in ranks))
        await agree.barrier("saved")
