"""Lets shards agree on sums, on small payloads to the lead, and on the lead's answers.

Shards do not speak to each other: every agreement goes through the supervisor, which waits until
all shards have sent theirs. No records come this way. There are four kinds:

    sum      every shard sends values          every shard gets the sum
    share    every shard sends a payload       every shard gets all payloads
    collect  every shard sends a payload       the lead gets all payloads
    ask      every shard sends a payload       the lead gets all payloads, computes one part for
                                               each shard, and every shard gets its part

To ask, the lead makes two calls (it collects, then deals); any other shard makes one, which waits
for both.

Order. A shard numbers its agreements as it makes them, in each scope from 0. An agreement's key is
its scope, its number and a name: ``producer:3/look``. So all shards must make the agreements of one
scope in the same order. Agreements of different scopes have no order between them: two tasks of a
shard may agree side by side. A request that is sent again has the same key and gets the first one's
answer.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from gcore_core.contract.errors import ContractError
from gcore_core.contract.launching import Endpoint, Peer, Reply, Request
from gcore_core.runtime.messages import (
    AGREE_ASK,
    AGREE_COLLECT,
    AGREE_DEAL,
    AGREE_SHARE,
    AGREE_SUM,
    Agreement,
    CollectRequest,
    DealRequest,
    SumRequest,
)
from gcore_core.wire.gathering import Act, Gathering
from gcore_core.wire.retry import Insist
from gcore_core.wire.service import Call, Service

KEPT = 64  # answers of a scope that are remembered for requests that are sent again
_PAYLOAD_LIMIT_BYTES = 16 << 20


async def _as_they_came(values: list[Any]) -> list[Any]:
    """Returns all shards' values in shard order, for an agreement that computes nothing."""
    return values


class AgreementService:
    """Brings together what the shards send, in the supervisor.

    A scope has a gathering of its own: one whose agreements follow each other fast must not push
    out the answers that a slow one may still be asked for.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._gatherings: defaultdict[str, Gathering] = defaultdict(
            lambda: Gathering(shards, keep=KEPT)
        )

    def register(self, service: Service) -> None:
        service.add(AGREE_SUM, self.sum)
        service.add(AGREE_SHARE, self.share)
        service.add(AGREE_COLLECT, self.collect)
        service.add(AGREE_DEAL, self.deal)
        service.add(AGREE_ASK, self.ask)

    async def _join(
        self,
        request: Agreement,
        value: Any,
        act: Act = _as_they_came,
    ) -> Any:
        scope, _, _ = request.key.rpartition(":")  # "producer" of "producer:3/look", "" of none
        gathering = self._gatherings[scope]
        # A lead collects and deals under one key: they are told apart by the kind of request.
        key = (type(request).__name__, request.key)
        return await gathering.join(key, request.shard, value, act)

    async def sum(self, request: SumRequest, call: Call) -> list[float]:
        """Returns, to every shard, the sums of all shards' values."""

        async def act(parts: list[list[float]]) -> list[float]:
            if len({len(part) for part in parts}) > 1:
                raise ContractError(
                    f"shards sum {[len(part) for part in parts]} values", where=request.key
                )
            sums = np.sum(np.array(parts, np.float64), axis=0)  # in shard order
            return [float(value) for value in sums]

        total: list[float] = await self._join(request, request.values, act)
        return total

    async def share(self, request: CollectRequest, call: Call) -> list[bytes]:
        """Returns all payloads in shard order."""
        if len(request.payload) * self._shards > _PAYLOAD_LIMIT_BYTES:
            raise ContractError(
                f"{len(request.payload)} bytes are too many to agree on", where=request.key
            )
        parts: list[bytes] = await self._join(request, request.payload)
        return parts

    async def collect(self, request: CollectRequest, call: Call) -> list[bytes]:
        """Returns all payloads in shard order to the lead, an empty list to any other shard."""
        parts = await self.share(request, call)
        return parts if request.shard == 0 else []

    async def deal(self, request: DealRequest, call: Call) -> bytes:
        """Returns to every shard its part of those that the lead sends."""
        if request.shard == 0 and len(request.parts) != self._shards:
            raise ContractError(
                f"{len(request.parts)} parts for {self._shards} shards", where=request.key
            )
        parts_by_sender: list[list[bytes]] = await self._join(request, request.parts)
        return parts_by_sender[0][request.shard]  # 0 is the lead; the others send none

    async def ask(self, request: CollectRequest, call: Call) -> bytes:
        """Returns, to a shard other than the lead, its part of what the lead computes from all
        payloads.

        In place of the two calls that the lead makes: this shard's payload is collected, then its
        part is waited for.
        """
        await self.collect(request, call)
        return await self.deal(DealRequest(request.key, request.shard, []), call)


class Agreements:
    """Makes one shard's agreements with the others; shard 0 is the lead.

    All shards must make the agreements of one scope in the same order.

    peer: the supervisor.
    shard: this shard's number.
    shards: how many there are.
    insist: calls the supervisor, and again where a call is lost.
    prefix: what the keys of this scope begin with, such as ``window:``.
    lead: whether this shard is the lead.
    """

    def __init__(
        self, peer: Peer, shard: int, shards: int, insist: Insist, prefix: str = ""
    ) -> None:
        self.shard = shard
        self.shards = shards
        self.lead = shard == 0
        self._peer = peer
        self._insist = insist
        self._prefix = prefix
        self._count = itertools.count()
        self._scopes: dict[str, Agreements] = {}

    def scope(self, name: str) -> Agreements:
        """Returns agreements with numbers of their own, for one of several tasks at once.

        A name always gives the same scope.
        """
        if name not in self._scopes:
            prefix = f"{self._prefix}{name}:"
            self._scopes[name] = Agreements(
                self._peer, self.shard, self.shards, self._insist, prefix
            )
        return self._scopes[name]

    def _key(self, name: str) -> str:
        return f"{self._prefix}{next(self._count)}/{name}"

    async def sum(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns the values summed over shards, float64[K].

        They are summed in shard order, so all shards get the same bits.
        """
        flat = [float(value) for value in np.asarray(values, np.float64).ravel()]
        request = SumRequest(self._key(name), self.shard, flat)
        return np.array(await self._call(AGREE_SUM, request), np.float64)

    async def share(self, name: str, payload: bytes) -> list[bytes]:
        """Returns every shard's payload in shard order."""
        request = CollectRequest(self._key(name), self.shard, payload)
        return await self._call(AGREE_SHARE, request)

    async def collect(self, name: str, payload: bytes) -> list[bytes]:
        """Returns every shard's payload in shard order to the lead, an empty list to the others."""
        request = CollectRequest(self._key(name), self.shard, payload)
        return await self._call(AGREE_COLLECT, request)

    async def ask(
        self,
        name: str,
        payload: bytes,
        lead: Callable[[list[bytes]], Awaitable[list[bytes]]],
    ) -> bytes:
        """Returns this shard's part of what the lead computes from all payloads.

        lead: all payloads -> one part for each shard, both in shard order. Only the lead runs it.
        """
        request = CollectRequest(self._key(name), self.shard, payload)
        if not self.lead:
            return await self._call(AGREE_ASK, request)
        payloads = await self._call(AGREE_COLLECT, request)
        parts = await lead(payloads)
        return await self._call(AGREE_DEAL, DealRequest(request.key, self.shard, parts))

    async def _call(self, endpoint: Endpoint[Request, Reply], request: Request) -> Reply:
        return await self._insist(self._peer, endpoint, request)

    async def barrier(self, name: str, flag: bool = False) -> bool:
        """Waits for all shards; returns whether any of them came with its flag up."""
        flags = await self.sum(name, np.array([flag]))
        return bool(flags.any())
