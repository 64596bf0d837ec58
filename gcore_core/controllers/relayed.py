"""Sends a shard's parts to the data-parallel ranks of a trainer, through relays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from gcore_core.contract.launching import Peer
from gcore_core.runtime.messages import Answer, Part, RelayedEndpoint, RelayRequest
from gcore_core.runtime.relay import RELAYED
from gcore_core.wire.retry import insist
from gcore_core.wire.service import encode


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
