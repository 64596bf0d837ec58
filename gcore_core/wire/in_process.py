"""Connects services inside one process: the same services and bytes, no sockets.

Requests, items and replies are encoded and decoded like on a socket, so nothing is shared as an
object. ``Weather`` decides what happens to a message on its way; the simulator of the test kit
delays and loses some, the inline launcher uses the calm one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeVar

from gcore_core.contract.deadlines import Deadlines
from gcore_core.contract.errors import DeadlineExceeded, WorkerDied
from gcore_core.contract.launching import Peer, Servable, Traffic
from gcore_core.wire import frames
from gcore_core.wire.peers import CallingPeer
from gcore_core.wire.service import Body, Call, encode, to_wire

T = TypeVar("T")
_LOST = -1  # in place of an answer, besides the kinds of frames: the connection broke
_Inbox = asyncio.Queue[tuple[int, bytes]]  # a call's answers that nobody has read yet


class Weather(Protocol):
    """Decides whether and when a message arrives."""

    async def travel(self, source: str, target: str, method: str) -> int:
        """Waits as long as the message travels; returns how often it arrives, 0 when it is lost.

        Only a request can arrive twice.
        """


class Calm:
    """Lets every message arrive once, at once."""

    async def travel(self, source: str, target: str, method: str) -> int:
        return 1


class InlineNetwork:
    """Holds all services of a run by name. ``view(name)`` is the network as one process sees it."""

    def __init__(self, weather: Weather | None = None) -> None:
        self.weather = weather or Calm()
        self.deadlines = Deadlines()
        self.services: dict[str, Servable] = {}
        self.copies: set[asyncio.Task[None]] = set()  # of requests that arrived once more

    def view(self, name: str) -> InlineView:
        return InlineView(self, name)


class InlineView:
    """Is the network as the process ``name`` sees it."""

    def __init__(self, network: InlineNetwork, name: str) -> None:
        self._network = network
        self._name = name
        self.traffic = Traffic()

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines of all calls: the views of a network share them."""
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


class InlinePeer(CallingPeer):
    """Calls the process ``name``, as the process ``source`` does."""

    _network: InlineNetwork

    def __init__(
        self,
        network: InlineNetwork,
        source: str,
        name: str,
        traffic: Traffic,
    ) -> None:
        super().__init__(name, network)
        self._traffic = traffic
        self._source = source

    async def close(self) -> None:
        pass

    async def _exchange(
        self,
        method: str,
        request: Any,
        deadline_s: float,
        wanted: int,
        decode: Callable[[Body], T],
    ) -> AsyncGenerator[T, None]:
        inbox: _Inbox = asyncio.Queue()
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
                if kind == _LOST:
                    raise WorkerDied(
                        f"the connection to {self.name} broke", where=self.name, why=method
                    )
                if kind == frames.ERROR:
                    raise self._error_in(method, body)
                if kind == wanted:
                    yield decode(body)
                if kind == frames.REPLY:
                    return
        finally:
            task.cancel()

    async def _serve(self, method: str, body: bytes, inbox: _Inbox) -> None:
        travel = self._network.weather.travel
        service = self._network.services.get(self.name)
        arrivals = await travel(self._source, self.name, method) if service is not None else 0
        if service is None or not arrivals:
            inbox.put_nowait((_LOST, b""))
            return
        if arrivals > 1:
            copy = asyncio.ensure_future(self._serve_copy(service, method, body))
            self._network.copies.add(copy)
            copy.add_done_callback(self._network.copies.discard)

        async def emit(item: bytes) -> None:
            if not await travel(self.name, self._source, method):
                inbox.put_nowait((_LOST, b""))
                raise asyncio.CancelledError
            inbox.put_nowait((frames.ITEM, item))

        call = Call(lambda: inbox.put_nowait((frames.PROGRESS, b"")))
        try:
            message = frames.REPLY, await service.handle(method, body, call, emit)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # isolation point: it is re-raised at the caller
            message = frames.ERROR, encode(to_wire(error, self.name))
        inbox.put_nowait(message if await travel(self.name, self._source, method) else (_LOST, b""))

    async def _serve_copy(self, service: Servable, method: str, body: bytes) -> None:
        """Serves the same request once more, some time later; nobody listens to its answer."""

        async def emit(item: bytes) -> None:
            pass

        await self._network.weather.travel(self._source, self.name, method)
        # isolation point: the caller has the answer to the first
        with contextlib.suppress(Exception):
            await service.handle(method, body, Call(lambda: None), emit)
