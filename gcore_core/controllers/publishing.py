"""Weights to every generator, verified, before the next step begins."""

from __future__ import annotations

import asyncio

from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placing import Placing
from gcore_core.processes.insist import insist
from gcore_core.processes.messages import Nothing, OpenPush, Published, PullWeights, PushConfirmed, SaveWeights
from gcore_core.processes.push import PUSH_DEADLINE_S


class Publishing:
    """Done once, by the lead; the others wait for it, which is also the barrier of the step."""

    def __init__(self, context: ControllerContext, config: SyncConfig, placing: Placing) -> None:
        self._context, self._config, self._placing = context, config, placing

    async def publish(self, version: int, release_before: int) -> None:
        """Records of steps before ``release_before`` have been trained on, and every sample of them shown."""
        if self._context.agree.lead:
            await self._push(version, release_before)
        await self._context.agree.barrier("published")

    async def _push(self, version: int, release_before: int) -> None:
        ranks, replicas = self._context.trainers, self._placing.replicas
        request = OpenPush(version, self._config.push_bucket_bytes, len(replicas))

        def pull(receiver: int) -> PullWeights:
            return PullWeights(version, receiver, ranks[0].name, release_before=release_before)

        await insist(ranks[0], "open_push", request, Nothing, PUSH_DEADLINE_S)
        await asyncio.gather(
            *(insist(rank, "open_push", request, Nothing, PUSH_DEADLINE_S) for rank in ranks[1:]),
            *(insist(replica, "pull", pull(i), PushConfirmed, PUSH_DEADLINE_S) for i, replica in enumerate(replicas)),
        )
        await insist(self._context.supervisor, "published", Published(version), Nothing, 60.0)

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
