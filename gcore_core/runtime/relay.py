"""Passes on what all shards have for some neighbouring ranks, so that a shard speaks to a few
workers, not to each.

With C shards and K ranks that makes C x K / ``RELAYED`` + K messages of a stage instead of C x K. A
relay holds references for its ranks only, and does not read them.
"""

from __future__ import annotations

import asyncio

import msgspec

from gcore_core.runtime.messages import RELAY, RelayRequest
from gcore_core.runtime.rpc.endpoints import Endpoint
from gcore_core.runtime.rpc.gathering import Gathering
from gcore_core.runtime.rpc.retry import insist
from gcore_core.runtime.rpc.service import Call, Network, Service

RELAYED = 32  # ranks behind one relay, which is the first worker of the first of them
DEADLINE_S = 1800.0
Raw = msgspec.Raw


class Relay:
    def __init__(self, network: Network, shards: int) -> None:
        self._network, self._gathering = network, Gathering(shards)

    def register(self, service: Service) -> None:
        service.add(RELAY, self.relay)

    async def relay(self, request: RelayRequest, call: Call) -> list[Raw]:
        """Each rank's answer to this shard. When all shards have come, a rank is asked once: with a
        list of their parts in shard order. It answers with a list as long. All workers of a rank
        are asked the same and answer the same.
        """

        async def act(requests: list[RelayRequest]) -> list[list[Raw]]:
            async def ask(workers: list[str], parts: list[Raw]) -> list[Raw]:
                peers = map(self._network.peer, workers)
                of_rank = Endpoint(request.method, list[Raw], list[Raw])
                answers = await asyncio.gather(
                    *(insist(peer, of_rank, parts, DEADLINE_S) for peer in peers)
                )
                return answers[0]

            by_rank = zip(*(shard.parts for shard in requests), strict=True)
            return await asyncio.gather(
                *(ask(w, list(p)) for w, p in zip(request.workers, by_rank, strict=True))
            )

        key = request.method, request.step
        answers: list[list[Raw]] = await self._gathering.join(key, request.shard, request, act)
        return [of_rank[request.shard] for of_rank in answers]
