"""Calls between processes: frames over one stream per pair, on unix sockets or TLS.

Addresses are ``unix:/path`` and ``tcp:127.0.0.1:port`` on one machine, ``tls:HOST:PORT`` between
machines. Any other is refused. Over TLS both sides show the run's certificate first, see ``tls``.
Then the side that connects proves that it is of the run, see ``proof``.

One call, frame by frame (``frames.Frame``; all have the call's number):

    caller  -> server   CALL       method and request
    caller <-  server   PROGRESS   as often as the server likes: it puts the deadline off
    caller <-  server   ITEM       of a stream, at most WINDOW_ITEMS ahead of the reader
    caller  -> server   TAKEN      the reader has taken half a window more
    caller <-  server   REPLY      or ERROR: the call is over
    caller  -> server   CANCEL     in place of waiting for that: the caller gives up
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import socket
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec

from gcore_core.contract.deadlines import Deadlines
from gcore_core.contract.errors import (
    AddressError,
    ContractError,
    DeadlineExceeded,
    GcoreError,
    WorkerDied,
)
from gcore_core.contract.launching import Peer, Servable, Traffic
from gcore_core.wire import frames, proof, tls
from gcore_core.wire.frames import Connection, Frame
from gcore_core.wire.peers import CallingPeer
from gcore_core.wire.service import (
    MESSAGE_LIMIT_BYTES,
    Body,
    Call,
    decoded,
    encode,
    to_wire,
)

T = TypeVar("T")
log = logging.getLogger(__name__)
WINDOW_ITEMS = 16  # of a stream on their way: its sender waits when its reader is slow
GREETING_S = 30.0  # the side that connects has so long to send its greeting
HANDSHAKE_S = 30.0  # of TLS, before it
_RETRY_S = 0.05  # between two tries to connect: a peer that starts is reached soon after
_SOCKET_PATH_LIMIT_BYTES = 107
_LOOPBACK = ("127.0.0.1", "[::1]", "localhost")
_OTHER_PORT = "set launcher.config.port to a free port"
_OTHER_PORT_OR_NONE = f"{_OTHER_PORT}, or leave it out to use unix sockets"
_EVERYWHERE = ("0.0.0.0", "[::]", "::", "*")
_FRAMES = msgspec.msgpack.Decoder(list[Frame])


class RpcNetwork:
    """Peers by name.

    addresses: name of every process that this one may talk to -> its address.
    identity: of the run, see ``tls``; empty where no address is a ``tls:`` one.
    public: name -> a further address at which that process serves those on other machines. It
        matters for the processes that are served here.
    timeout_s: how long a connection is tried, until somebody answers at the address.
    silence_s: a connection over TLS ends when the machine at its other end gives no sign of life
        for so long; 0: the kernel's own limits hold, which are hours. A process there that is
        stopped or busy gives such signs all the same: its kernel does.
    expired: called with (peer, what was waited for) at every deadline that expires.
    memory: shared by all connections, see ``frames.Connection``.
    """

    def __init__(
        self,
        addresses: dict[str, str],
        secret: bytes,
        timeout_s: float = 30.0,
        deadlines: Deadlines | None = None,
        *,
        identity: bytes = b"",
        public: Mapping[str, str] | None = None,
        silence_s: float = 0.0,
    ) -> None:
        self.silence_s = silence_s
        self.addresses = addresses
        self.identity = identity
        self.public = dict(public or {})
        self.secret = secret
        self.timeout_s = timeout_s
        self.deadlines = deadlines or Deadlines()
        self.traffic = Traffic()
        self.expired: Callable[[str, str], None] = _ignore_expired
        self.memory = bytearray(frames.READ_BYTES)
        self._peers: dict[str, RpcPeer] = {}
        self._servers: list[tuple[asyncio.Server, set[_Session]]] = []
        self.closed = False  # nobody is admitted any more

    @cached_property
    def contexts(self) -> tls.Contexts:
        """The contexts of the run's identity, made when TLS is first used."""
        return tls.contexts(self.identity)

    def peer(self, name: str) -> Peer:
        if name not in self._peers:
            check_private(self.addresses[name], self.identity)
            self._peers[name] = RpcPeer(name, self)
        return self._peers[name]

    async def serve(self, name: str, service: Servable) -> None:
        """Serves at the address of ``name``, and at its public one if it has one, until ``close``.

        Raises AddressError when an address is taken, too long, not private or of another machine.
        """
        addresses = [self.addresses[name]]
        if name in self.public:
            addresses.append(self.public[name])
        for address in addresses:
            check_private(address, self.identity)
        for address in dict.fromkeys(addresses):
            await self._listen(address, service)

    async def _listen(self, address: str, service: Servable) -> None:
        loop = asyncio.get_running_loop()
        sessions = set[_Session]()

        def accept() -> Connection:
            return _Session(service, self, sessions).stream

        listen = loop.create_unix_server if address.startswith("unix:") else loop.create_server
        options = _tls_options(self.contexts.server) if _is_tls(address) else {}
        with _explaining_unusable(address):
            # The backlog is for all processes of a run at once.
            server = await listen(accept, **_parsed(address), **options, backlog=4096)
        self._servers.append((server, sessions))

    async def close(self) -> None:
        """Ends the connections that this process made, then its servers with theirs."""
        self.closed = True
        try:
            await asyncio.gather(
                *(peer.close() for peer in self._peers.values()),
                return_exceptions=True,
            )
        finally:  # also where this is cancelled: nobody is served any more
            streams = [session.stream for _, sessions in self._servers for session in sessions]
            for server, _ in self._servers:
                server.close()
            for stream in streams:
                stream.end()
        await asyncio.gather(*(stream.close() for stream in streams), return_exceptions=True)


class _Session:
    """Serves one stream: admits who connects, then runs its calls side by side.

    sessions: all of the server; this one is among them for as long as its stream lasts. A stream
        begins when TLS has let in who connects. Of whom it keeps out, nothing is held.
    """

    def __init__(
        self,
        service: Servable,
        network: RpcNetwork,
        sessions: set[_Session],
    ) -> None:
        self.stream = Connection(
            self._greeted, self._lost, network.memory, network.traffic, self._begun
        )
        self._service = service
        self._network = network
        self._sessions = sessions
        # call number -> (its task, how many items of its stream may still be sent)
        self._running: dict[int, tuple[asyncio.Task[None], asyncio.Semaphore]] = {}

    def _begun(self) -> None:
        loop = asyncio.get_running_loop()
        self.stream.end_in_silence(self._network.silence_s)
        self._greeting_timer = loop.call_later(GREETING_S, self.stream.end)
        self._sessions.add(self)
        if self._network.closed:  # meanwhile
            self.stream.end()

    def _greeted(self, message: bytes | bytearray) -> None:
        """Admits who proves that it is of the run; ends any other stream."""
        refusal = proof.refusal(message, self._network.secret, self._service.name)
        self._greeting_timer.cancel()
        self.stream.send(encode(refusal))
        if refusal:
            self.stream.end()
        else:
            self.stream.admit(self._take)

    def _take(self, message: bytes | bytearray) -> None:
        """Begins calls, cancels them, and lets their streams go on, as the frames say."""
        for frame in decoded(_FRAMES, message, "frames", self._service.name):
            if frame.kind == frames.CALL:
                window = asyncio.Semaphore(WINDOW_ITEMS)
                task = asyncio.ensure_future(self._run(frame, window))
                self._running[frame.call] = task, window
                task.add_done_callback(partial(self._running.pop, frame.call))
            elif frame.call not in self._running:
                continue  # it has ended, and the caller does not know it yet
            elif frame.kind == frames.CANCEL:
                task, _ = self._running[frame.call]
                task.cancel()
            elif frame.kind == frames.TAKEN:
                _, window = self._running[frame.call]
                for _ in range(WINDOW_ITEMS // 2):
                    window.release()

    def _lost(self, why: str) -> None:
        if why:
            log.warning("a connection was ended: %s", why)
        self._greeting_timer.cancel()
        self._sessions.discard(self)
        for task, _ in self._running.values():
            task.cancel()

    async def _run(self, frame: Frame, window: asyncio.Semaphore) -> None:
        """Runs one call: its items, then its reply or its error, are put on the stream."""
        name = self._service.name
        send = self.stream.put
        call = Call(lambda: send(Frame(frame.call, frames.PROGRESS)))

        async def emit(item: bytes) -> None:
            await window.acquire()
            body = _fitting(item, f"an item of {frame.method}", name)
            send(Frame(frame.call, frames.ITEM, "", body))

        try:
            reply = await self._service.handle(frame.method, frame.body, call, emit)
            body = _fitting(reply, f"the reply to {frame.method}", name)
            send(Frame(frame.call, frames.REPLY, "", body))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # isolation point: it is re-raised at the caller
            send(Frame(frame.call, frames.ERROR, "", msgspec.Raw(encode(to_wire(error, name)))))


class RpcPeer(CallingPeer):
    """Calls over a stream; it is the client's end.

    It connects on first use. A stream that breaks fails the calls that run over it; the next call
    connects again.
    """

    _network: RpcNetwork

    def __init__(self, name: str, network: RpcNetwork) -> None:
        super().__init__(name, network)
        self.address = network.addresses[name]
        self._calls: dict[int, _Inbox] = {}  # by the call's number
        self._ids = itertools.count(1)
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._no_answer = ""  # why the last try to connect led to nothing

    async def _exchange(
        self,
        method: str,
        request: Any,
        deadline_s: float,
        wanted: int,
        decode: Callable[[Body], T],
    ) -> AsyncGenerator[T, None]:
        """Exchanges frames as ``CallingPeer`` says.

        When the caller stops reading, or a deadline expires, the server is told to cancel the call.
        """
        body = _fitting(encode(request), f"a request of {method}", self.name)
        connection = self._connection or await self._connected()
        number = next(self._ids)
        inbox = _Inbox(deadline_s, partial(self._expired, method, deadline_s))
        self._calls[number] = inbox
        connection.put(Frame(number, frames.CALL, method, body))
        is_over = False  # at the server: there is nothing to cancel
        n_items = 0
        try:
            while not is_over:
                frame = inbox.unread.popleft() if inbox.unread else await inbox.next()
                if isinstance(frame, GcoreError):
                    is_over = isinstance(frame, WorkerDied)
                    raise frame
                if frame.kind == frames.ERROR:
                    is_over = True
                    raise self._error_in(method, frame.body)
                is_over = frame.kind == frames.REPLY
                if frame.kind == wanted:
                    yield decode(frame.body)
                if frame.kind == frames.ITEM:
                    n_items += 1
                    if n_items % (WINDOW_ITEMS // 2) == 0:
                        connection.put(Frame(number, frames.TAKEN))
        finally:
            del self._calls[number]
            inbox.close()
            if not is_over:
                connection.put(Frame(number, frames.CANCEL))

    def _expired(self, method: str, deadline_s: float) -> DeadlineExceeded:
        """Tells the network of a deadline that expired; returns the caller's error."""
        what = f"no sign of progress for {deadline_s:g} s in {method}"
        self._network.expired(self.name, what)
        return DeadlineExceeded(
            what, where=self.name, todo="raise run.patience_s if the work may take longer"
        )

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
        """Tries until somebody answers, or ``timeout_s`` are over."""
        try:
            async with asyncio.timeout(self._network.timeout_s):
                while not await self._try_to_connect():
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise WorkerDied(
                f"nobody answers at {self.address}",
                where=self.name,
                why=self._no_answer,
                process=self.name,
            ) from None

    async def _try_to_connect(self) -> bool:
        """Connects and greets once; whether that led to a connection.

        Raises ContractError when the server refuses it, answers what is no answer, or has another
        certificate than the run's.
        """
        loop = asyncio.get_running_loop()
        # The server's answer to the greeting (bytes), or why the connection was lost (str).
        answers = asyncio.Queue[Body | str]()
        make = partial(
            Connection,
            answers.put_nowait,
            answers.put_nowait,
            self._network.memory,
            self._network.traffic,
        )
        is_unix = self.address.startswith("unix:")
        connect = loop.create_unix_connection if is_unix else loop.create_connection
        options: dict[str, Any] = {}
        if _is_tls(self.address):
            options = _tls_options(self._network.contexts.client) | {"server_hostname": ""}
        try:
            _, connection = await connect(make, **_parsed(self.address), **options)
        except ssl.SSLCertVerificationError:
            raise ContractError(
                f"a process that is not of this run answers at {self.address}",
                where=self.name,
                why="its certificate is not the run's",
                todo="end the run or the program that listens there, or choose another port",
                process=self.name,
            ) from None
        except OSError as error:
            self._no_answer = str(error)
            return False
        connection.end_in_silence(self._network.silence_s)
        try:
            connection.send(proof.prove(self._network.secret))
            proof.check_answer(await answers.get(), self.name)
            if connection.ended:  # the server went away without a word
                self._no_answer = "the connection was ended before it was admitted"
                return False
            connection.admit(self._take)
            connection.lost = self._lost
            self._connection = connection
        finally:
            if self._connection is not connection:
                connection.end()
        return True

    def _take(self, message: bytes | bytearray) -> None:
        for frame in decoded(_FRAMES, message, "frames", self.name):
            if (inbox := self._calls.get(frame.call)) is None:
                continue  # the caller has given the call up
            if frame.kind == frames.PROGRESS:
                inbox.progress()
            else:
                inbox.put(frame)

    def _lost(self, why: str) -> None:
        self._connection = None
        why = why or "the connection ended"
        for inbox in self._calls.values():
            inbox.put(
                WorkerDied("the process is gone", where=self.name, why=why, process=self.name)
            )

    async def close(self) -> None:
        """Ends the connection, or the try to make one."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            await self._connection.close()


class _Inbox:
    """Holds what has come for one call and was not read yet, and watches the call's deadline.

    A sign of progress wakes nobody, and the timer is set again only when it goes off, so neither
    costs anything where a call has many items.

    unread: the oldest first.
    deadline_s: seconds without a frame, while the reader waits, after which the call has failed.
    expire: makes the error of such a call.
    """

    def __init__(self, deadline_s: float, expire: Callable[[], GcoreError]) -> None:
        self._deadline_s = deadline_s
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self.unread = deque[Frame | GcoreError]()
        self._reader: asyncio.Future[None] | None = None  # while it waits
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0  # when the last frame came, or the reader began to wait

    def put(self, answer: Frame | GcoreError) -> None:
        """Adds a frame, or why there will be none."""
        self.unread.append(answer)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def progress(self) -> None:
        """Puts the deadline off."""
        self._heard_s = self._loop.time()

    async def next(self) -> Frame | GcoreError:
        """Returns what came first, and waits for it; a DeadlineExceeded when nothing comes."""
        if not self.unread:
            self._heard_s = self._loop.time()
            if self._timer is None and math.isfinite(self._deadline_s):
                self._timer = self._loop.call_later(self._deadline_s, self._look)
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self.unread.popleft()

    def _look(self) -> None:
        """Ends the call if nothing came in time, else sets the timer again."""
        self._timer = None
        if self._reader is None:
            return  # the reader is busy; ``next`` sets the timer again
        expires_s = self._heard_s + self._deadline_s
        if self._loop.time() < expires_s:
            self._timer = self._loop.call_at(expires_s, self._look)
        elif not self._reader.done():
            self.put(self._expire())

    def close(self) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()


def _ignore_expired(peer: str, what: str) -> None:
    """Does nothing at a deadline that expires, where nobody has set ``expired``."""


def _fitting(body: bytes, what: str, where: str) -> msgspec.Raw:
    """Returns ``body`` for a frame. Raises ContractError when it is too long."""
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise ContractError(
            f"{what} has {len(body)} bytes, the limit is {MESSAGE_LIMIT_BYTES}", where=where
        )
    return msgspec.Raw(body)


def _parsed(address: str) -> dict[str, Any]:
    """Parses an address into the arguments of the event loop's functions."""
    scheme, _, path_or_host = address.partition(":")
    if scheme == "unix":
        return {"path": path_or_host}
    host, _, port = path_or_host.rpartition(":")
    return {"host": host.strip("[]"), "port": int(port)}


def _is_tls(address: str) -> bool:
    return address.startswith("tls:")


def _tls_options(context: ssl.SSLContext) -> dict[str, Any]:
    """Returns the arguments of the event loop's functions that make them use TLS."""
    return {
        "ssl": context,
        "ssl_handshake_timeout": HANDSHAKE_S,
        "ssl_shutdown_timeout": frames.CLOSE_S,
    }


def check_private(address: str, identity: bytes = b"") -> None:
    """Raises AddressError for an address that others could use, or that is too long or malformed.

    identity: of the run; without one a ``tls:`` address is refused.
    """
    scheme, _, path_or_host = address.partition(":")
    if scheme == "unix":
        nbytes = len(path_or_host.encode())
        if nbytes > _SOCKET_PATH_LIMIT_BYTES:
            raise AddressError(
                f"the socket path has {nbytes} bytes, the system allows {_SOCKET_PATH_LIMIT_BYTES}",
                where=path_or_host,
                todo="set launcher.config.socket_dir to a shorter directory, for example /tmp",
            )
    elif scheme == "tls":
        _check_tls(address, identity)
    elif scheme != "tcp" or path_or_host.rpartition(":")[0] not in _LOOPBACK:
        raise AddressError(
            "refused to use an address that other machines can reach without TLS",
            where=address,
            todo="use a tls: address between machines, a unix socket or a loopback address on one",
        )


def _check_tls(address: str, identity: bytes) -> None:
    """Raises AddressError unless it names one host and a port, and there is an identity."""
    host, _, port = address.removeprefix("tls:").rpartition(":")
    if not host or host in _EVERYWHERE or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise AddressError(
            "not an address of one machine",
            where=address,
            todo="write tls:HOST:PORT, with an address of the machine and a port up to 65535",
        )
    if not identity:
        raise AddressError(
            "refused to use TLS without the run's certificate",
            where=address,
            todo="have the launcher make one: gcore_nodes.identity.make_identity",
        )


def check_free(address: str, identity: bytes = b"") -> None:
    """Raises AddressError when something else listens at the address, or ``check_private`` does.

    Of a unix socket only the latter is checked: a socket that an earlier process left at the path
    is no obstacle, asyncio removes it. Any other address must be one of this machine.
    """
    check_private(address, identity)
    place = _parsed(address)
    if "port" in place:
        family = socket.AF_INET6 if ":" in place["host"] else socket.AF_INET
        with socket.socket(family) as probe, _explaining_unusable(address):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((place["host"], place["port"]))


@contextlib.contextmanager
def _explaining_unusable(address: str) -> Iterator[None]:
    """Raises AddressError in place of the system's error for an address that cannot be had."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressError(
                "the address is in use",
                where=address,
                why="another program, or a run that has not ended, listens there",
                todo=_OTHER_PORT if _is_tls(address) else _OTHER_PORT_OR_NONE,
            ) from error
        # asyncio of Python 3.13 says without a number that a host has no address to bind to.
        no_address = error.errno in (errno.EADDRNOTAVAIL, None)
        if no_address or isinstance(error, socket.gaierror):
            raise AddressError(
                "this machine does not have the address",
                where=address,
                why=error.strerror or f"{error}",
                todo="name the machine by an address of one of its own networks (`ip address`)",
            ) from error
        raise
