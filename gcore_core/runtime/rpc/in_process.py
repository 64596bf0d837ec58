"""The network inside one process: the same services, the same bytes, no sockets.

Requests, items and replies are encoded and decoded like on a socket, so nothing is shared as an
object. ``Weather`` decides what happens to a message on its way; the simulator of the test kit
delays and loses some, the inline launcher uses the calm one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from gcore_core.contract.deadlines import Deadlines
from gcore_core.contract.errors import ContractError, DeadlineExceeded, WorkerDied
from gcore_core.contract.launching import (
    Endpoint,
    Item,
    Peer,
    Reply,
    Request,
    Servable,
    StreamEndpoint,
    Traffic,
)
from gcore_core.runtime.rpc.service import Call, RemoteFailure, encode, from_wire, to_wire


class Weather(Protocol):
    async def travel(self, source: str, target: str, method: str) -> int:
        """Waits as long as the message travels; returns how often it arrives, 0 when it is lost.

        Only a request can arrive twice.
        """


class Calm:
    """Every message arrives once, at once."""

    async def travel(self, source: str, target: str, method: str) -> int:
        return 1


class InlineNetwork:
    """All services of a run by name. ``view(name)`` is the network as one process sees it."""

    def __init__(self, weather: Weather | None = None) -> None:
        self.weather = weather or Calm()
        self.deadlines = Deadlines()
        self.services: dict[str, Servable] = {}
        self.copies: set[asyncio.Task[None]] = set()  # of requests that arrived once more

    def view(self, name: str) -> InlineView:
        return InlineView(self, name)


class InlineView:
    """The network as the process ``name`` sees it."""

    def __init__(self, network: InlineNetwork, name: str) -> None:
        self._network = network
        self._name = name
        self.traffic = Traffic()

    @property
    def deadlines(self) -> Deadlines:
        """Of the whole process: all its views share them."""
        return self._network.deadlines

    @deadlines.setter
    def deadlines(self, deadlines: Deadlines) -> None:
        self._network.deadlines = deadlines

    def peer(self, name: str) -> Peer:
        return InlinePeer(self._network, self._name, name, self.traffic)

    async def serve(self, name: str, service: Servable) -> None:
        self._network.services[name] = service

    async def close(self) -> None:
        self._network.services.pop(self._name, None)


class InlinePeer:
    """The process ``name``, as the process ``source`` calls it."""

    def __init__(self, network: InlineNetwork, source: str, name: str, traffic: Traffic) -> None:
        self.name = name
        self._traffic = traffic
        self._network = network
        self._source = source

    async def call(
        self,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> Reply:
        limit_s = self._network.deadlines.seconds(endpoint.wait, deadline_s)
        exchange = self._exchange(endpoint.name, request, limit_s)
        async with contextlib.aclosing(exchange) as messages:
            async for kind, body in messages:
                if kind == "reply":
                    return endpoint.reply_decoder.decode(body)
        raise ContractError(f"{endpoint.name} gave no reply", where=self.name)

    async def stream(
        self,
        endpoint: StreamEndpoint[Request, Item],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Item, None]:
        limit_s = self._network.deadlines.seconds(endpoint.wait, deadline_s)
        exchange = self._exchange(endpoint.name, request, limit_s)
        async with contextlib.aclosing(exchange) as messages:
            async for kind, body in messages:
                if kind == "item":
                    yield endpoint.item_decoder.decode(body)

    async def close(self) -> None:
        pass

    async def _exchange(
        self, method: str, request: Any, deadline_s: float
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        body = encode(request)
        self._traffic.add(body)
        task = asyncio.ensure_future(self._serve(method, body, inbox))
        try:
            while True:
                try:
                    async with asyncio.timeout(deadline_s):
                        kind, body = await inbox.get()
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"no sign of progress for {deadline_s:g} s in {method}", where=self.name
                    ) from None
                self._traffic.add(body)
                if kind == "lost":
                    raise WorkerDied(
                        f"the connection to {self.name} broke", where=self.name, why=method
                    )
                if kind == "error":
                    raise from_wire(msgspec.msgpack.decode(body, type=RemoteFailure))
                if kind != "progress":
                    yield kind, body
                if kind == "reply":
                    return
        finally:
            task.cancel()

    async def _serve(self, method: str, body: bytes, inbox: asyncio.Queue[Any]) -> None:
        travel = self._network.weather.travel
        service = self._network.services.get(self.name)
        arrivals = await travel(self._source, self.name, method) if service is not None else 0
        if service is None or not arrivals:
            inbox.put_nowait(("lost", b""))
            return
        if arrivals > 1:
            copy = asyncio.ensure_future(self._serve_copy(service, method, body))
            self._network.copies.add(copy)
            copy.add_done_callback(self._network.copies.discard)

        async def emit(item: bytes) -> None:
            if not await travel(self.name, self._source, method):
                inbox.put_nowait(("lost", b""))
                raise asyncio.CancelledError
            inbox.put_nowait(("item", item))

        call = Call(lambda: inbox.put_nowait(("progress", b"")))
        try:
            message = "reply", await service.handle(method, body, call, emit)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # isolation point: it is re-raised at the caller
            message = "error", encode(to_wire(error, self.name))
        inbox.put_nowait(
            message if await travel(self.name, self._source, method) else ("lost", b"")
        )

    async def _serve_copy(self, service: Servable, method: str, body: bytes) -> None:
        """The same request once more, some time later; nobody listens to its answer."""

        async def emit(item: bytes) -> None:
            pass

        await self._network.weather.travel(self._source, self.name, method)
        # isolation point: the caller has the answer to the first
        with contextlib.suppress(Exception):
            await service.handle(method, body, Call(lambda: None), emit)
