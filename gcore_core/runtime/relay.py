"""Relays: workers that pass on what all shards have for some neighbouring ranks.

So a shard speaks to a few workers, not to each. With C shards and K ranks a stage has
C x K / ``RELAYED`` + K messages instead of C x K. An example with two shards, ``RELAYED`` = 2, and
three ranks of one worker each:

    controller.0 -> policy.0   its parts for ranks 0 and 1
    controller.1 -> policy.0   its parts for ranks 0 and 1: now all shards have come
    policy.0     -> policy.1   both shards' parts for rank 1; rank 0 is policy.0 itself, no message
    controller.0 -> policy.2   its part for rank 2, and so on

A relay holds references for its ranks only, and reads nothing but what is for its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from gcore_core.contract.launching import Endpoint, Network, Peer
from gcore_core.runtime.messages import Answer, Part, RelayedEndpoint, RelayRequest
from gcore_core.wire.gathering import Gathering
from gcore_core.wire.retry import insist
from gcore_core.wire.service import Call, Handler, Service, decoded, encode

RELAYED = 32  # ranks behind one relay; the first worker of the first of them is the relay
Raw = msgspec.Raw  # a part or an answer, encoded


class Relay:
    """Makes a worker of a rank a relay to its own rank and the ranks after it.

    service: the worker's.
    shards: how many controllers there are; a relay waits for all of them.
    """

    def __init__(self, network: Network, service: Service, shards: int) -> None:
        self._network = network
        self._service = service
        self._gathering = Gathering(shards)

    def add(
        self,
        endpoint: RelayedEndpoint[Part, Answer],
        handler: Handler[list[Part], list[Answer]],
    ) -> None:
        """Serves ``endpoint``: to shards as a relay, to other relays as a worker of a rank."""
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
        """Returns each rank's answer to the shard of ``request``, encoded.

        It waits until all shards have come. Then each rank is asked once, with a list of all
        shards' parts in shard order, and answers with a list as long. All workers of a rank are
        asked the same and answer the same.
        """

        async def ask_worker(name: str, parts: list[Raw]) -> list[Raw]:
            if name == self._service.name:
                return await _call_here(endpoint, handler, parts, call, name)
            return await insist(self._network.peer(name), endpoint.of_rank_encoded, parts)

        async def ask_rank(workers: list[str], parts: list[Raw]) -> list[Raw]:
            answers = await asyncio.gather(*(ask_worker(name, parts) for name in workers))
            return answers[0]

        async def act(requests: list[RelayRequest]) -> list[list[Raw]]:
            # From shard -> its part for each rank to rank -> each shard's part for it. Every shard
            # names the same workers, so this request's serve for all.
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
    """Calls the handler of this process as if the parts had come in a message."""
    what = f"request {endpoint.name!r}"
    parts_decoded = decoded(endpoint.of_rank.request_decoder, encode(parts), what, name)
    return [Raw(encode(answer)) for answer in await handler(parts_decoded, call)]


async def ask_ranks(
    shard: int,
    ranks: Sequence[Sequence[Peer]],
    endpoint: RelayedEndpoint[Part, Answer],
    step: int,
    parts: Sequence[Part],
) -> list[Answer]:
    """Sends one part to each data-parallel rank; returns the ranks' answers in their order.

    The first worker of every ``RELAYED`` ranks is a relay: it gets one request with the parts of
    these ranks and passes them on.

    shard: whose parts these are.
    ranks: the workers of each rank.
    step: with the endpoint it names the request, so that a repeated one is answered as the first.
    parts: one for each rank.
    """

    async def ask(ranks: Sequence[Sequence[Peer]], parts: Sequence[Part]) -> list[Answer]:
        names = [[worker.name for worker in rank] for rank in ranks]
        bodies = [msgspec.Raw(encode(part)) for part in parts]
        request = RelayRequest(step, shard, names, bodies)
        relay = ranks[0][0]
        return await insist(relay, endpoint.of_relay, request)

    relayed = [slice(first, first + RELAYED) for first in range(0, len(ranks), RELAYED)]
    answers = await asyncio.gather(*(ask(ranks[some], parts[some]) for some in relayed))
    return [answer for part in answers for answer in part]
