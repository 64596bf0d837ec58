"""Calls between processes: frames over one stream per pair, on unix sockets.

Addresses are ``unix:/path`` or ``tcp:127.0.0.1:port``; anything else is refused, as long as there
is no TLS. Who connects shows the run's secret and the version of gcore-core, which must be the
server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import itertools
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from gcore_core import __version__
from gcore_core.contract.deadlines import Deadlines
from gcore_core.contract.errors import (
    AddressError,
    ContractError,
    DeadlineExceeded,
    GcoreError,
    WorkerDied,
)
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
from gcore_core.runtime.rpc import wire
from gcore_core.runtime.rpc.service import (
    MESSAGE_LIMIT_BYTES,
    Call,
    RemoteFailure,
    decoded,
    encode,
    from_wire,
    to_wire,
)
from gcore_core.runtime.rpc.wire import Connection, Frame, Greeting

log = logging.getLogger(__name__)
WINDOW_ITEMS = 16  # of a stream on their way: its sender waits when its reader is slow
GREETING_S = 30.0  # for who connects to say who it is
_RETRY_S = 0.05  # a peer that starts is reached soon after
_SOCKET_PATH_LIMIT = 107
_FRAMES, _FAILURE = msgspec.msgpack.Decoder(list[Frame]), msgspec.msgpack.Decoder(RemoteFailure)
_GREETING, _ANSWER = msgspec.msgpack.Decoder(Greeting), msgspec.msgpack.Decoder(str)


class RpcNetwork:
    """Peers by name.

    addresses: of every name that this process may talk to.
    timeout_s: for which somebody is looked for who answers at an address.
    """

    def __init__(
        self,
        addresses: dict[str, str],
        secret: bytes,
        timeout_s: float = 30.0,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.addresses, self.secret, self.timeout_s = addresses, secret, timeout_s
        self.deadlines = deadlines or Deadlines()
        self.traffic = Traffic()
        self.expired: Callable[[str, str], None] = lambda peer, what: (
            None
        )  # told of every deadline that expires
        self.memory = bytearray(wire.READ_BYTES)
        self._peers: dict[str, RpcPeer] = {}
        self._servers: list[tuple[asyncio.Server, set[_Session]]] = []

    def peer(self, name: str) -> Peer:
        if name not in self._peers:
            check_private(self.addresses[name])
            self._peers[name] = RpcPeer(name, self)
        return self._peers[name]

    async def serve(self, name: str, service: Servable) -> None:
        """Raises AddressError when the address is taken, too long or not private."""
        address, sessions, loop = self.addresses[name], set[_Session](), asyncio.get_running_loop()
        check_private(address)
        listen = loop.create_unix_server if address.startswith("unix:") else loop.create_server
        with _told_in_use(address):
            # all processes of a run may come at once
            server = await listen(
                lambda: _Session(service, self, sessions).stream, **_parsed(address), backlog=4096
            )
        self._servers.append((server, sessions))

    async def close(self) -> None:
        await asyncio.gather(
            *(peer.close() for peer in self._peers.values()), return_exceptions=True
        )
        for server, sessions in self._servers:
            server.close()
            await asyncio.gather(
                *(session.stream.close() for session in sessions), return_exceptions=True
            )


class _Session:
    """The server's end of a stream."""

    def __init__(self, service: Servable, network: RpcNetwork, sessions: set[_Session]) -> None:
        self.stream = Connection(self._greeted, self._lost, network.memory, network.traffic)
        self._service, self._secret, self._all = service, network.secret, sessions
        self._running: dict[int, tuple[asyncio.Task[None], asyncio.Semaphore]] = {}
        self._late = asyncio.get_running_loop().call_later(GREETING_S, self.stream.end)
        self._all.add(self)

    def _greeted(self, message: bytes | bytearray) -> None:
        told, refusal = decoded(_GREETING, message, "greeting", self._service.name), ""
        if not hmac.compare_digest(told.secret, self._secret):
            refusal = "wrong or missing run secret"
        elif told.version != __version__:
            refusal = (
                f"gcore-core {__version__} here ({sys.executable}), {told.version} "
                f"({told.python}) there"
            )
        self._late.cancel()
        self.stream.send(encode(refusal))
        if refusal:
            self.stream.end()
        else:
            self.stream.admit(self._take)

    def _take(self, message: bytes | bytearray) -> None:
        for frame in decoded(_FRAMES, message, "frames", self._service.name):
            if frame.kind == wire.CALL:
                window = asyncio.Semaphore(WINDOW_ITEMS)
                task = asyncio.ensure_future(self._run(frame, window))
                self._running[frame.call] = task, window
                task.add_done_callback(partial(self._running.pop, frame.call))
            elif frame.kind == wire.CANCEL and frame.call in self._running:
                self._running[frame.call][0].cancel()
            elif frame.kind == wire.TAKEN and frame.call in self._running:
                for _ in range(WINDOW_ITEMS // 2):
                    self._running[frame.call][1].release()

    def _lost(self, why: str) -> None:
        if why:
            log.warning("a connection was ended: %s", why)
        self._late.cancel()
        self._all.discard(self)
        for task, _ in self._running.values():
            task.cancel()

    async def _run(self, frame: Frame, window: asyncio.Semaphore) -> None:
        name, put = self._service.name, self.stream.put
        call = Call(lambda: put(Frame(frame.call, wire.PROGRESS)))

        async def emit(item: bytes) -> None:
            await window.acquire()
            put(
                Frame(frame.call, wire.ITEM, "", _fitting(item, f"an item of {frame.method}", name))
            )

        try:
            reply = await self._service.handle(frame.method, frame.body, call, emit)
            put(
                Frame(
                    frame.call,
                    wire.REPLY,
                    "",
                    _fitting(reply, f"the reply to {frame.method}", name),
                )
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:  # isolation point: it is re-raised at the caller
            put(Frame(frame.call, wire.ERROR, "", msgspec.Raw(encode(to_wire(error, name)))))


class RpcPeer:
    """The client's end. Connects on first use; a broken stream fails its calls and the next call
    connects anew.
    """

    def __init__(self, name: str, network: RpcNetwork) -> None:
        self.name, self._network, self._address = name, network, network.addresses[name]
        self._calls: dict[int, asyncio.Queue[Frame | GcoreError]] = {}
        self._ids = itertools.count(1)
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None

    async def call(
        self,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> Reply:
        name = endpoint.name
        limit_s = self._network.deadlines.seconds(endpoint.wait, deadline_s)
        async with contextlib.aclosing(self._exchange(name, request, limit_s)) as frames:
            async for frame in frames:
                if frame.kind == wire.REPLY:
                    what = f"reply to {name!r}"
                    return decoded(endpoint.reply_decoder, frame.body, what, self.name)
        raise ContractError(f"{name} gave no reply", where=self.name)

    async def stream(
        self,
        endpoint: StreamEndpoint[Request, Item],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Item, None]:
        name = endpoint.name
        limit_s = self._network.deadlines.seconds(endpoint.wait, deadline_s)
        async with contextlib.aclosing(self._exchange(name, request, limit_s)) as frames:
            async for frame in frames:
                if frame.kind == wire.ITEM:
                    what = f"item of {name!r}"
                    yield decoded(endpoint.item_decoder, frame.body, what, self.name)

    async def _exchange(
        self, method: str, request: Any, deadline_s: float
    ) -> AsyncGenerator[Frame, None]:
        body = _fitting(encode(request), f"a request of {method}", self.name)
        connection = self._connection or await self._connected()
        number, inbox = next(self._ids), asyncio.Queue[Frame | GcoreError]()
        self._calls[number] = inbox
        connection.put(Frame(number, wire.CALL, method, body))
        done, taken = False, 0
        try:
            while not done:
                frame = (
                    inbox.get_nowait()
                    if not inbox.empty()
                    else await self._next(inbox, method, deadline_s)
                )
                if isinstance(frame, GcoreError):
                    done = isinstance(frame, WorkerDied)
                    raise frame
                if frame.kind == wire.ERROR:
                    done = True
                    raise from_wire(
                        decoded(_FAILURE, frame.body, f"error of {method!r}", self.name)
                    )
                done = frame.kind == wire.REPLY
                if frame.kind != wire.PROGRESS:
                    yield frame
                if frame.kind == wire.ITEM:
                    taken += 1
                    if taken % (WINDOW_ITEMS // 2) == 0:
                        connection.put(Frame(number, wire.TAKEN))
        finally:
            del self._calls[number]
            if not done:
                connection.put(Frame(number, wire.CANCEL))

    async def _next(
        self, inbox: asyncio.Queue[Frame | GcoreError], method: str, deadline_s: float
    ) -> Any:
        def expire() -> None:
            what = f"no sign of progress for {deadline_s:g} s in {method}"
            self._network.expired(self.name, what)
            inbox.put_nowait(
                DeadlineExceeded(what, where=self.name, todo="run.patience_s says how long")
            )

        late = asyncio.get_running_loop().call_later(deadline_s, expire)
        try:
            return await inbox.get()
        finally:
            late.cancel()

    async def _connected(self) -> Connection:
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.ensure_future(self._connect())
        await asyncio.shield(self._connecting)  # one attempt for all who wait
        if self._connection is None:
            raise WorkerDied(
                "the connection ended as soon as it was made", where=self.name, process=self.name
            )
        return self._connection

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._network.timeout_s):
                while not await self._greeted():
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise WorkerDied(
                f"nobody answers at {self._address}", where=self.name, process=self.name
            ) from None

    async def _greeted(self) -> bool:
        """Whether anybody answers. Raises ContractError when the connection is refused."""
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Any]()
        connect = (
            loop.create_unix_connection
            if self._address.startswith("unix:")
            else loop.create_connection
        )
        made = partial(
            Connection,
            told.put_nowait,
            told.put_nowait,
            self._network.memory,
            self._network.traffic,
        )
        try:
            _, connection = await connect(made, **_parsed(self._address))
        except OSError:
            return False
        try:
            connection.send(encode(Greeting(self._network.secret, __version__, sys.executable)))
            message = await told.get()  # or why the connection was lost
            refusal = (
                message
                if isinstance(message, str)
                else decoded(_ANSWER, message, "greeting", self.name)
            )
            if refusal:
                raise ContractError(
                    "refused the connection", where=self.name, why=refusal, process=self.name
                )
            if connection.ended:
                return False
            connection.admit(self._take)
            connection.lost, self._connection = self._lost, connection
        finally:
            if self._connection is not connection:
                connection.end()
        return True

    def _take(self, message: bytes | bytearray) -> None:
        for frame in decoded(_FRAMES, message, "frames", self.name):
            if frame.call in self._calls:
                self._calls[frame.call].put_nowait(frame)

    def _lost(self, why: str) -> None:
        self._connection = None
        why = why or "the connection ended"
        for inbox in self._calls.values():
            inbox.put_nowait(
                WorkerDied("the process is gone", where=self.name, why=why, process=self.name)
            )

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            await self._connection.close()


def _fitting(body: bytes, what: str, where: str) -> msgspec.Raw:
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise ContractError(
            f"{what} has {len(body)} bytes, the limit is {MESSAGE_LIMIT_BYTES}", where=where
        )
    return msgspec.Raw(body)


def _parsed(address: str) -> dict[str, Any]:
    """As event loops take it."""
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    return {"path": rest} if scheme == "unix" else {"host": host.strip("[]"), "port": int(port)}


def check_private(address: str) -> None:
    """Raises AddressError for an address that others could reach, or that is too long."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        if len(rest.encode()) > _SOCKET_PATH_LIMIT:
            raise AddressError(
                (
                    f"the socket path has {len(rest.encode())} bytes, the system allows "
                    f"{_SOCKET_PATH_LIMIT}"
                ),
                where=rest,
                todo="set launcher.config.socket_dir to a shorter directory, for example /tmp",
            )
    elif scheme != "tcp" or rest.rpartition(":")[0] not in ("127.0.0.1", "[::1]", "localhost"):
        raise AddressError(
            "refused to use an address that other machines can reach without TLS",
            where=address,
            todo="use a loopback address or a unix socket",
        )


def check_free(address: str) -> None:
    """Raises AddressError when something else listens at the address, or it is too long or not
    private.
    """
    check_private(address)
    place = _parsed(address)
    if (
        "port" in place
    ):  # the socket that a worker that was started again has left at a path, asyncio removes
        family = socket.AF_INET6 if ":" in place["host"] else socket.AF_INET
        with socket.socket(family) as probe, _told_in_use(address):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((place["host"], place["port"]))


@contextlib.contextmanager
def _told_in_use(address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise AddressError(
            "the address is in use",
            where=address,
            why="another program, or a run that has not ended, listens there",
            todo="set launcher.config.port to a free port, or leave it out to use unix sockets",
        ) from error
