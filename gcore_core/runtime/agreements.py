"""What shards agree on: sums, small gathers to the lead, its answers. A star through the
supervisor.

Every agreement has a key made of the step and a name, so asking twice is harmless, and an epoch: a
shard of an older epoch (one that was replaced) is refused. Nothing here returns records.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from gcore_core.contract.errors import ContractError
from gcore_core.runtime.messages import Agreement, CollectRequest, DealRequest, SumRequest
from gcore_core.runtime.rpc.gathering import Act, Gathering
from gcore_core.runtime.rpc.service import Call, Peer, Service

DEADLINE_S = 3600.0
_PAYLOAD_LIMIT_BYTES = 16 << 20


async def _told(parts: list[Any]) -> list[Any]:
    return parts


class AgreementService:
    """The middle of the star, in the supervisor."""

    def __init__(self, shards: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self._shards = shards
        self._gathering = Gathering(shards, keep=64)

    def register(self, service: Service) -> None:
        service.add("agree.sum", SumRequest, self.sum)
        service.add("agree.collect", CollectRequest, self.collect)
        service.add("agree.deal", DealRequest, self.deal)
        service.add("agree.ask", CollectRequest, self.ask)

    async def _join(self, request: Agreement, value: Any, act: Act = _told) -> Any:
        if request.epoch != self.epoch:
            raise ContractError(
                f"epoch {request.epoch} is over, this is {self.epoch}",
                where=f"shard {request.shard}",
            )
        return await self._gathering.join(
            (type(request).__name__, request.key), request.shard, value, act
        )

    async def sum(self, request: SumRequest, call: Call) -> list[float]:
        async def act(parts: list[list[float]]) -> list[float]:
            if len({len(part) for part in parts}) > 1:
                raise ContractError(
                    f"shards sum {[len(part) for part in parts]} values", where=request.key
                )
            return [
                float(value) for value in np.sum(np.array(parts, np.float64), axis=0)
            ]  # in shard order

        total: list[float] = await self._join(request, request.values, act)
        return total

    async def collect(self, request: CollectRequest, call: Call) -> list[bytes]:
        """The payloads in shard order for the lead, none for the others."""
        if len(request.payload) * self._shards > _PAYLOAD_LIMIT_BYTES:
            raise ContractError(
                f"{len(request.payload)} bytes are too many to agree on", where=request.key
            )
        parts: list[bytes] = await self._join(request, request.payload)
        return parts if request.shard == 0 else []

    async def deal(self, request: DealRequest, call: Call) -> bytes:
        if request.shard == 0 and len(request.parts) != self._shards:
            raise ContractError(
                f"{len(request.parts)} parts for {self._shards} shards", where=request.key
            )
        parts: list[list[bytes]] = await self._join(request, request.parts)
        return parts[0][request.shard]

    async def ask(self, request: CollectRequest, call: Call) -> bytes:
        """For all but the lead: its part of what the lead deals when it has collected."""
        await self.collect(request, call)
        return await self.deal(DealRequest(request.key, request.shard, request.epoch, []), call)


class Agreements:
    """One shard's end. All shards call the same agreements in the same order; shard 0 is the
    lead.
    """

    def __init__(self, peer: Peer, shard: int, shards: int, insist: Any, epoch: int = 0) -> None:
        self.shard, self.shards, self.lead = shard, shards, shard == 0
        self._peer, self._epoch, self._insist = peer, epoch, insist
        self._count = itertools.count()

    def _key(self, name: str) -> str:
        return f"{next(self._count)}/{name}"

    async def sum(self, name: str, values: np.ndarray) -> np.ndarray:
        """float64[K] summed over shards, in shard order, so that all get the same bits."""
        flat = [float(value) for value in np.asarray(values, np.float64).ravel()]
        request = SumRequest(self._key(name), self.shard, self._epoch, flat)
        return np.array(await self._call("sum", request, list[float]), np.float64)

    async def collect(self, name: str, payload: bytes) -> list[bytes]:
        """Every shard's payload for the lead, an empty list for the others."""
        request = CollectRequest(self._key(name), self.shard, self._epoch, payload)
        return list(await self._call("collect", request, list[bytes]))

    async def ask(
        self, name: str, payload: bytes, lead: Callable[[list[bytes]], Awaitable[list[bytes]]]
    ) -> bytes:
        """This shard's part of what the lead makes of all payloads. ``lead``: payloads, in shard
        order, -> parts.
        """
        request = CollectRequest(self._key(name), self.shard, self._epoch, payload)
        if not self.lead:
            return bytes(await self._call("ask", request, bytes))
        parts = await lead(await self._call("collect", request, list[bytes]))
        return bytes(
            await self._call(
                "deal", DealRequest(request.key, self.shard, self._epoch, parts), bytes
            )
        )

    async def _call(self, method: str, request: Agreement, reply: Any) -> Any:
        return await self._insist(self._peer, f"agree.{method}", request, reply, DEADLINE_S)

    async def barrier(self, name: str, flag: bool = False) -> bool:
        """Whether any shard came with its flag up."""
        return bool((await self.sum(name, np.array([flag]))).any())
