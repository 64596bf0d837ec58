"""Weights to every generator, verified, before the next step begins."""

from __future__ import annotations

import asyncio

import msgspec

from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.processes.insist import insist
from gcore_core.processes.messages import (
    Nothing,
    OpenPush,
    Published,
    PublishedReply,
    PullWeights,
    PushConfirmed,
    SaveWeights,
)
from gcore_core.processes.push import PUSH_DEADLINE_S


class Publishing:
    """Done once, by the lead; the others learn the outcome by a deal, which is also the barrier of the step."""

    def __init__(self, context: ControllerContext, config: SyncConfig) -> None:
        self._context, self._config = context, config

    async def publish(self, version: int) -> bool:
        """Returns, on every shard alike, whether the run is asked to stop."""
        agree, parts = self._context.agree, []
        if agree.lead:
            stop = await self._push(version)
            parts = [msgspec.msgpack.encode(stop)] * agree.shards
        return msgspec.msgpack.decode(await agree.deal("published", parts), type=bool)

    async def _push(self, version: int) -> bool:
        ranks, replicas = self._context.trainers, self._context.replicas
        request = OpenPush(version, self._config.push_bucket_bytes, len(replicas))
        await insist(ranks[0], "open_push", request, Nothing, PUSH_DEADLINE_S)
        await asyncio.gather(
            *(insist(rank, "open_push", request, Nothing, PUSH_DEADLINE_S) for rank in ranks[1:]),
            *(
                insist(replica, "pull", PullWeights(version, i, ranks[0].name), PushConfirmed, PUSH_DEADLINE_S)
                for i, replica in enumerate(replicas)
            ),
        )
        told = await insist(self._context.supervisor, "published", Published(version), PublishedReply, 60.0)
        return told.stop

    async def save(self) -> None:
        """The final weights in Hugging Face layout. Every rank takes part, since it may need collectives."""
        agree, output = self._context.agree, self._context.facts.output
        if agree.lead and output:
            await asyncio.gather(
                *(
                    insist(rank, "save_pretrained", SaveWeights(output), Nothing, PUSH_DEADLINE_S)
                    for rank in self._context.trainers
                )
            )
        await agree.barrier("saved")
