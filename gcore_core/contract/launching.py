"""Defines what the core calls on a launcher, and the words of the network that it opens.

A run's processes speak by requests to named endpoints. A launcher chooses where the processes live
and what carries the bytes between them; ``gcore_core.kits.launching`` has parts to build one from.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from gcore_core.contract.deadlines import Deadlines, Wait

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")


# -- what a process can be asked -------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint(Generic[Request, Reply]):
    """Names something that a process answers with one reply.

    name: how it is called on the wire; unique among what one process serves.
    request, reply: types that msgspec can decode.
    wait: what its caller waits for, which says for how long.
    """

    name: str
    request: type[Request]
    reply: type[Reply]
    wait: Wait = Wait.ANSWER

    @cached_property
    def request_decoder(self) -> msgspec.msgpack.Decoder[Request]:
        """The decoder of requests, made once: making it takes longer than decoding a message."""
        return msgspec.msgpack.Decoder(self.request)

    @cached_property
    def reply_decoder(self) -> msgspec.msgpack.Decoder[Reply]:
        return msgspec.msgpack.Decoder(self.reply)


@dataclass(frozen=True)
class StreamEndpoint(Generic[Request, Item]):
    """Names something that a process answers with any number of items.

    name: how it is called on the wire; unique among what one process serves.
    request, item: types that msgspec can decode.
    wait: what its caller waits for before each item.
    """

    name: str
    request: type[Request]
    item: type[Item]
    wait: Wait = Wait.ANSWER

    @cached_property
    def request_decoder(self) -> msgspec.msgpack.Decoder[Request]:
        """The decoder of requests, made once: making it takes longer than decoding a message."""
        return msgspec.msgpack.Decoder(self.request)

    @cached_property
    def item_decoder(self) -> msgspec.msgpack.Decoder[Item]:
        return msgspec.msgpack.Decoder(self.item)


ALIVE = Endpoint("alive", NoneType, NoneType)  # every process answers it, whatever it serves


# -- how it is asked -------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Counts what a process has sent and received.

    nbytes: encoded bytes.
    messages: messages of its transport.
    """

    nbytes: int = 0
    messages: int = 0

    def add(self, message: bytes | bytearray) -> None:
        """Counts one message."""
        self.nbytes += len(message)
        self.messages += 1


class Servable(Protocol):
    """Answers the requests to one process. The core makes it; a network serves it.

    name: of the process, under which others reach it.
    """

    name: str

    def progress(self) -> None:
        """Extends the deadline of every running request."""

    async def handle(
        self, method: str, body: Any, call: Any, emit: Callable[[bytes], Awaitable[None]]
    ) -> bytes:
        """Runs one request and returns the encoded reply.

        method: name of an endpoint.
        body: the encoded request, in any buffer.
        call: ``gcore_core.runtime.rpc.service.Call`` of this request.
        emit: takes the items of a stream, encoded.
        """


class Peer(Protocol):
    """Calls one other process.

    name: of the process there.

    A ``deadline_s`` counts from the last sign of progress, not from the start. Without one the
    network's deadline for the endpoint's ``wait`` holds.
    """

    name: str

    async def call(
        self,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> Reply:
        """Sends a request and returns the reply.

        Raises what the peer raised, DeadlineExceeded, or WorkerDied when the connection is gone.
        """

    def stream(
        self,
        endpoint: StreamEndpoint[Request, Item],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Item, None]:
        """Sends a request and yields its items, in the order in which they were sent.

        Closing the generator early cancels the request. Raises as ``call`` does.
        """

    async def close(self) -> None:
        """Closes the connection. Requests under way fail."""


class Network(Protocol):
    """Connects a process with the others.

    traffic: what this process sent and received.
    deadlines: those of calls that give none of their own.
    """

    traffic: Traffic
    deadlines: Deadlines

    def peer(self, name: str) -> Peer:
        """Returns the process of that name; nothing is sent until it is asked something."""

    async def serve(self, name: str, service: Servable) -> None:
        """Answers under ``name``, from when this returns until ``close``. Raises AddressError."""

    async def close(self) -> None:
        """Stops serving and closes every connection."""


# -- where processes live --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Site:
    """Holds what a supervisor needs of a place that is ready for workers.

    network: the supervisor's view of the network.
    agent: the node agent, which starts workers, tells of their exits and of what they use.
    addresses: name of a process -> its address, for all processes of the run.
    secret: at least 16 bytes, new for each site; who does not know it cannot connect.
    store: the directory of the node's store.
    meeting: a private directory in which ranks may meet.
    end_agent: ends an agent that hangs; None: it is in this process.
    """

    network: Network
    agent: Peer
    addresses: dict[str, str]
    secret: bytes
    store: Path
    meeting: Path
    end_agent: Callable[[], Awaitable[None]] | None = None


@runtime_checkable
class Launcher(Protocol):
    """Decides where the processes of a run live. It is made and called in the supervisor."""

    def site(
        self, names: list[str], supervisor: Servable, logs: Path
    ) -> AbstractAsyncContextManager[Site]:
        """Opens a site and serves the supervisor there.

        Closing the site, also after an error, leaves nothing behind. Raises AddressError or
        ConfigError when it cannot be opened.

        names: of the processes that will be started, without the supervisor's.
        supervisor: what the supervisor answers.
        logs: the directory for the log of each process.
        """
