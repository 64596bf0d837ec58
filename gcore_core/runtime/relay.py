"""Passes on what all shards have for some neighbouring ranks, so that a shard speaks to a few
workers, not to each.

With C shards and K ranks that makes C x K / ``RELAYED`` + K messages of a stage instead of C x K.
An example with two shards, ``RELAYED`` = 2, and three ranks of one worker each:

    controller.0 -> policy.0   its parts for ranks 0 and 1
    controller.1 -> policy.0   its parts for ranks 0 and 1: now all shards have come
    policy.0     -> policy.1   both shards' parts for rank 1; rank 0 is policy.0 itself, no message
    controller.0 -> policy.2   its part for rank 2, and so on

A relay holds references for its ranks only, and reads nothing but what is for its own.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from gcore_core.contract.launching import Endpoint, Network
from gcore_core.runtime.messages import Answer, Part, RelayedEndpoint, RelayRequest
from gcore_core.runtime.rpc.gathering import Gathering
from gcore_core.runtime.rpc.retry import insist
from gcore_core.runtime.rpc.service import Call, Handler, Service, decoded, encode

RELAYED = 32  # ranks behind one relay, which is the first worker of the first of them
Raw = msgspec.Raw


class Relay:
    """What makes a worker of a rank a relay to the ranks after its own."""

    def __init__(self, network: Network, service: Service, shards: int) -> None:
        self._network = network
        self._service = service
        self._gathering = Gathering(shards)

    def add(
        self, endpoint: RelayedEndpoint[Part, Answer], handler: Handler[list[Part], list[Answer]]
    ) -> None:
        """Serves ``endpoint``: for shards as a relay, for other relays as a worker of a rank."""
        self._service.add(endpoint.of_rank, handler)
        # A relay takes and gives encoded parts: the same bytes, not decoded on their way.
        encoded = Endpoint(endpoint.of_relay.name, RelayRequest, list[Raw])
        self._service.add(encoded, partial(self.relay, endpoint, handler))

    async def relay(
        self,
        endpoint: RelayedEndpoint[Any, Any],
        handler: Handler[list[Any], list[Any]],
        request: RelayRequest,
        call: Call,
    ) -> list[Raw]:
        """Each rank's answer to this shard. When all shards have come, a rank is asked once: with a
        list of their parts in shard order. It answers with a list as long. All workers of a rank
        are asked the same and answer the same.
        """

        async def ask_worker(name: str, parts: list[Raw]) -> list[Raw]:
            if name == self._service.name:
                return await _call_here(endpoint, handler, parts, call, name)
            return await insist(self._network.peer(name), endpoint.of_rank_encoded, parts)

        async def ask_rank(workers: list[str], parts: list[Raw]) -> list[Raw]:
            answers = await asyncio.gather(*(ask_worker(name, parts) for name in workers))
            return answers[0]

        async def act(requests: list[RelayRequest]) -> list[list[Raw]]:
            by_rank = zip(*(shard.parts for shard in requests), strict=True)
            return await asyncio.gather(
                *(ask_rank(w, list(p)) for w, p in zip(request.workers, by_rank, strict=True))
            )

        key = endpoint.name, request.step
        answers: list[list[Raw]] = await self._gathering.join(key, request.shard, request, act)
        return [of_rank[request.shard] for of_rank in answers]


async def _call_here(
    endpoint: RelayedEndpoint[Part, Answer],
    handler: Handler[list[Part], list[Answer]],
    parts: list[Raw],
    call: Call,
    name: str,
) -> list[Raw]:
    """The handler of this process, called as if the parts had come in a message."""
    what = f"request {endpoint.name!r}"
    own = decoded(endpoint.of_rank.request_decoder, encode(parts), what, name)
    return [Raw(encode(answer)) for answer in await handler(own, call)]
