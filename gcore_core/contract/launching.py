"""Defines what the core calls on a launcher, and the words of the network that it opens.

A run's processes speak by requests to named endpoints. A launcher chooses where the processes live
and what carries the bytes between them; ``gcore_core.kits.launching`` has parts to build one from.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from gcore_core.contract.deadlines import Deadlines, Wait
from gcore_core.contract.placement import Device
from gcore_core.contract.site_files import OneDisk, SiteFiles

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


# Every process answers it, whatever it serves.
ALIVE = Endpoint("alive", NoneType, NoneType)


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
        call: ``gcore_core.wire.service.Call`` of this request.
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
    deadlines: of calls that give none of their own.
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
class NodeFacts:
    """Says what a machine of the run has, before anything is placed there.

    name: of the node's agent; the run knows the node by it.
    devices: the machine's, in its own order; each is numbered as the machine numbers it.
    host: the name or address by which a person knows the machine; "": the one that the supervisor
        runs on.
    is_private: whether the network between it and other such nodes is declared private, so that
        ranks of one trainer may speak over it in plain.
    device_bytes: memory of each of its devices that are accelerators; 0: not known.
    host_bytes: memory of the machine; 0: not known.
    """

    name: str
    devices: tuple[Device, ...]
    host: str = ""
    is_private: bool = False
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SiteNode:
    """Holds what a supervisor needs of one machine that is ready for workers.

    agent: the node's agent. It starts workers, and tells of their exits and of what they use.
    store: the directory of the node's store, on the node.
    meeting: a private directory on the node in which ranks may meet.
    end_agent: ends an agent that hangs; None: it is in this process.
    asks_to_leave: returns when the machine asks to leave the run; it may wait for ever. None: it
        never asks. Raises WorkerDied when the agent is lost.
    let_go: says that the machine leaves the run on purpose: the launcher's next site is without it,
        and when this one is closed, what a person has started there ends well. None: the machine
        leaves a run only by being lost.
    """

    agent: Peer
    store: Path
    meeting: Path
    end_agent: Callable[[], Awaitable[None]] | None = None
    asks_to_leave: Callable[[], Awaitable[None]] | None = None
    let_go: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    """Holds what a supervisor needs of a place that is ready for workers.

    network: the supervisor's view of the network.
    secret: at least 16 bytes, new for each site; who does not know it cannot connect.
    home: name of the node that the supervisor runs on.
    nodes: name of a node's agent -> the node.
    where: process -> name of the node that it is to run on.
    views: node -> (name of a process -> its address, as seen from that node), for all processes.
    public: process -> the address that it serves for other nodes, besides the one in its own node's
        view. Those that no other node speaks with are not in it.
    meeting_addresses: role -> "HOST:PORT" where its ranks meet, for roles whose workers are on
        several nodes of a private network.
    identity: certificate and key of the run, PEM; empty where nothing leaves the machine.
    files: joins the disks of the nodes; where all share one, there is nothing to do.
    newcomer: waits for a machine that the run may use and this site does not have, and returns what
        a person calls it; it may wait for ever. The launcher's next site may have it. None: none
        may come.
    """

    network: Network
    secret: bytes
    home: str
    nodes: dict[str, SiteNode]
    where: dict[str, str]
    views: dict[str, dict[str, str]]
    public: dict[str, str] = field(default_factory=dict)
    meeting_addresses: dict[str, str] = field(default_factory=dict)
    identity: bytes = b""
    files: SiteFiles = field(default_factory=OneDisk)
    newcomer: Callable[[], Awaitable[str]] | None = None

    @property
    def home_node(self) -> SiteNode:
        """The node that the supervisor runs on."""
        return self.nodes[self.home]

    @property
    def has_processes(self) -> bool:
        """Whether workers are processes; else they are tasks of this one."""
        return self.home_node.end_agent is not None

    def node_of(self, process: str) -> SiteNode:
        """Returns the node that a process runs on."""
        return self.nodes[self.where[process]]


@runtime_checkable
class Launcher(Protocol):
    """Decides where the processes of a run live. It is made and called in the supervisor."""

    async def nodes(self, devices: int | str) -> list[NodeFacts]:
        """Returns the machines that the run may use, in order.

        It is called before anything is placed and before ``site``; nothing stays behind.

        devices: how many devices the run is to have on all of them together; "auto": all that there
            are.
        Raises ConfigError, naming the machine, where one cannot be used.
        """

    def site(
        self, where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AbstractAsyncContextManager[Site]:
        """Opens a site and serves the supervisor there.

        Closing the site leaves nothing behind on any machine. It is closed with the error that
        ended the attempt, where one did; a WorkerError may be followed by another site. Raises
        AddressError or ConfigError when it cannot be opened.

        where: process -> name of the node, of those that ``nodes`` returned, that it will be
            started on; without the supervisor.
        supervisor: what the supervisor answers.
        logs: the directory for the log of each process.
        """


@dataclass(frozen=True, kw_only=True)
class FoundNodes:
    """Says which machines a run may use now, and which of those that it names are missing.

    nodes: in order.
    missing: host -> why it cannot be used.
    refusal: why the run must not use just these nodes; "": it may.
    may_grow: the job says that more may come later. A run that begins may have fewer replicas then.
    """

    nodes: list[NodeFacts]
    missing: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    may_grow: bool = False


@runtime_checkable
class ElasticLauncher(Launcher, Protocol):
    """A launcher whose run may go on with fewer machines than it names. It is optional.

    ``find_nodes`` is called in place of ``nodes``. ``site`` then opens a site on the nodes that it
    returned the last time, and asks no other machine.
    """

    async def find_nodes(self, devices: int | str, *, again: bool) -> FoundNodes:
        """Returns the machines that the run may use now.

        devices: as for ``nodes``. Where a machine is missing it is an upper bound.
        again: the run goes on from a checkpoint, so it had all machines once. Otherwise it begins,
            and a name that is wrong must not make it smaller: unless the job says that fewer will
            do, a missing machine is a ConfigError, as in ``nodes``.
        Raises ConfigError for what waiting does not fix.
        """
