"""Calls between processes: frames over one bidirectional grpc.aio stream per pair, on unix sockets.

Frames written in one turn of the event loop travel in one gRPC message, so a call costs far less than a unary one.
Addresses are ``unix:/path`` or ``tcp:127.0.0.1:port``; anything else is refused, as long as there is no TLS. Every
stream carries the run's secret and the version of gcore-core, which both sides compare.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import itertools
import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec

from gcore_core import __version__
from gcore_core.errors import AddressError, ContractError, DeadlineExceeded, GcoreError, WorkerDied
from gcore_core.processes.service import (
    MESSAGE_LIMIT_BYTES,
    Call,
    Peer,
    RemoteFailure,
    Service,
    Traffic,
    decoded,
    encode,
    from_wire,
    to_wire,
)

T = TypeVar("T")
log = logging.getLogger(__name__)
CALL, CANCEL, ITEM, REPLY, ERROR, PROGRESS, TAKEN = range(7)
WINDOW_ITEMS = 16  # of a stream on their way: its sender waits when its reader is slow
_METHOD = "/gcore/session"
_OPTIONS = [
    ("grpc.max_receive_message_length", 2 * MESSAGE_LIMIT_BYTES),  # our own limit is checked frame by frame
    ("grpc.max_send_message_length", 2 * MESSAGE_LIMIT_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),  # a peer that starts is reached soon after
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)
_SOCKET_PATH_LIMIT = 107


class Frame(msgspec.Struct, array_like=True, frozen=True):
    call: int
    kind: int
    method: str = ""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


_FRAMES = msgspec.msgpack.Decoder(list[Frame])
_FAILURE = msgspec.msgpack.Decoder(RemoteFailure)


class _Outbox:
    """Collects frames and writes them in one message per turn of the loop."""

    def __init__(self, write: Callable[[bytes], Any], traffic: Traffic) -> None:
        self._write, self._frames, self._ready = write, [], asyncio.Event()  # type: ignore[var-annotated]
        self._traffic, self._writing, self._closed = traffic, False, False
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(_stream_over)

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._ready.set()

    async def _run(self) -> None:
        while not self._closed:
            await self._ready.wait()
            self._ready.clear()
            frames, self._frames = self._frames, []
            self._writing = True
            for batch in _batches(frames):
                message = encode(batch)
                self._traffic.add(message)
                await self._write(message)
            self._writing = False

    async def close(self) -> None:
        self._closed = True
        if self._frames or self._writing:  # gRPC cannot end a stream, nor tell why, while a write is under way
            await asyncio.wait([self._task], timeout=1.0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _stream_over(task: asyncio.Task[None]) -> None:
    """A write fails when the stream has ended; its reader is the one who tells why."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("a stream ended while it was written to: %s", error)


class RpcNetwork:
    """Peers by name; ``addresses`` maps every name this process may talk to."""

    def __init__(self, addresses: dict[str, str], secret: bytes, timeout_s: float = 30.0) -> None:
        self.addresses, self._secret, self._timeout_s = addresses, secret, timeout_s
        self.traffic = Traffic()
        self.expired: Callable[[str, str], None] = lambda peer, what: None  # told of every deadline that expires
        self._peers: dict[str, RpcPeer] = {}
        self._servers: list[grpc.aio.Server] = []

    def peer(self, name: str) -> Peer:
        if name not in self._peers:
            target = _target(self.addresses[name])
            self._peers[name] = RpcPeer(name, target, self._secret, self._timeout_s, self)
        return self._peers[name]

    async def serve(self, name: str, service: Service) -> None:
        """Raises AddressError when the address is taken, too long or not private."""
        address = self.addresses[name]
        target = _target(address)
        check_free(address)
        server = grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0)])
        session = grpc.stream_stream_rpc_method_handler(_Session(service, self._secret, self.traffic).serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("gcore", {"session": session}),))
        try:
            server.add_insecure_port(target)
        except RuntimeError as error:
            raise _in_use(address) from error
        await server.start()
        self._servers.append(server)

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers.values()), return_exceptions=True)
        await asyncio.gather(*(server.stop(0.2) for server in self._servers), return_exceptions=True)


class _Session:
    """The server's end of one stream."""

    def __init__(self, service: Service, secret: bytes, traffic: Traffic) -> None:
        self._service, self._secret, self._traffic = service, secret, traffic

    async def serve(self, requests: Any, context: Any) -> None:
        await self._admit(context)
        outbox = _Outbox(context.write, self._traffic)
        running: dict[int, tuple[asyncio.Task[None], asyncio.Semaphore]] = {}
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                self._traffic.add(message)
                for frame in decoded(_FRAMES, message, "frames", self._service.name):
                    if frame.kind == CALL:
                        window = asyncio.Semaphore(WINDOW_ITEMS)
                        task = asyncio.ensure_future(self._run(frame, outbox, window))
                        running[frame.call] = task, window
                        task.add_done_callback(partial(running.pop, frame.call))
                    elif frame.kind == CANCEL and frame.call in running:
                        running[frame.call][0].cancel()
                    elif frame.kind == TAKEN and frame.call in running:
                        for _ in range(WINDOW_ITEMS // 2):
                            running[frame.call][1].release()
        finally:
            for task, _ in list(running.values()):
                task.cancel()
            await outbox.close()

    async def _admit(self, context: Any) -> None:
        told = dict(context.invocation_metadata() or ())
        if not hmac.compare_digest(told.get("g-core-secret", ""), self._secret.hex()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing run secret")
        if told.get("g-core-version") != __version__:
            theirs = f"{told.get('g-core-version')} ({told.get('g-core-python')})"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"gcore-core {__version__} here ({sys.executable}), {theirs} there",
            )

    async def _run(self, frame: Frame, outbox: _Outbox, window: asyncio.Semaphore) -> None:
        call = Call(lambda: outbox.put(Frame(frame.call, PROGRESS)))

        async def emit(item: bytes) -> None:
            await window.acquire()
            outbox.put(Frame(frame.call, ITEM, "", _fitting(item, f"an item of {frame.method}", self._service.name)))

        try:
            reply = await self._service.handle(frame.method, frame.body, call, emit)
            outbox.put(
                Frame(frame.call, REPLY, "", _fitting(reply, f"the reply to {frame.method}", self._service.name))
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:  # isolation point: it is re-raised at the caller
            outbox.put(Frame(frame.call, ERROR, "", msgspec.Raw(encode(to_wire(error, self._service.name)))))


class RpcPeer:
    """The client's end. Connects on first use; a broken stream fails its calls and the next call connects anew."""

    def __init__(self, name: str, target: str, secret: bytes, timeout_s: float, network: RpcNetwork) -> None:
        self.name, self._network, self._traffic = name, network, network.traffic
        self._target, self._secret, self._timeout_s = target, secret, timeout_s
        self._calls: dict[int, asyncio.Queue[Frame | GcoreError]] = {}
        self._ids = itertools.count(1)
        self._outbox: _Outbox | None = None
        self._channel: grpc.aio.Channel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None

    async def call(self, method: str, request: Any, reply: type[T], *, deadline_s: float = 60.0) -> T:
        async with contextlib.aclosing(self._exchange(method, request, deadline_s)) as frames:
            async for frame in frames:
                if frame.kind == REPLY:
                    return decoded(msgspec.msgpack.Decoder(reply), frame.body, f"reply to {method!r}", self.name)
        raise ContractError(f"{method} gave no reply", where=self.name)

    async def stream(
        self, method: str, request: Any, item: type[T], *, deadline_s: float = 60.0
    ) -> AsyncGenerator[T, None]:
        decoder = msgspec.msgpack.Decoder(item)
        async with contextlib.aclosing(self._exchange(method, request, deadline_s)) as frames:
            async for frame in frames:
                if frame.kind == ITEM:
                    yield decoded(decoder, frame.body, f"item of {method!r}", self.name)

    async def _exchange(self, method: str, request: Any, deadline_s: float) -> AsyncGenerator[Frame, None]:
        body = _fitting(encode(request), f"a request of {method}", self.name)
        outbox = await self._connected()
        number, inbox = next(self._ids), asyncio.Queue[Frame | GcoreError]()
        self._calls[number] = inbox
        outbox.put(Frame(number, CALL, method, body))
        done, taken = False, 0
        try:
            while not done:
                try:
                    frame = inbox.get_nowait() if not inbox.empty() else await _within(inbox.get(), deadline_s)
                except TimeoutError:
                    what = f"no sign of progress for {deadline_s:g} s in {method}"
                    self._network.expired(self.name, what)
                    raise DeadlineExceeded(what, where=self.name, todo="run.patience_s says how long") from None
                if isinstance(frame, GcoreError):
                    done = True
                    raise frame
                if frame.kind == ERROR:
                    done = True
                    raise from_wire(decoded(_FAILURE, frame.body, f"error of {method!r}", self.name))
                done = frame.kind == REPLY
                if frame.kind != PROGRESS:
                    yield frame
                if frame.kind == ITEM:
                    taken += 1
                    if taken % (WINDOW_ITEMS // 2) == 0:
                        outbox.put(Frame(number, TAKEN))
        finally:
            del self._calls[number]
            if not done and self._outbox is outbox:
                outbox.put(Frame(number, CANCEL))

    async def _connected(self) -> _Outbox:
        if self._outbox is None:
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.ensure_future(self._connect())
            await asyncio.shield(self._connecting)  # one attempt for all who wait
        if self._outbox is None:
            raise WorkerDied("the connection ended as soon as it was made", where=self.name, process=self.name)
        return self._outbox

    async def _connect(self) -> None:
        await self._drop_channel()
        self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        try:
            await _within(self._channel.channel_ready(), self._timeout_s)
        except TimeoutError:
            raise WorkerDied(f"nobody answers at {self._target}", where=self.name, process=self.name) from None
        told = (
            ("g-core-secret", self._secret.hex()),
            ("g-core-version", __version__),
            ("g-core-python", sys.executable),
        )
        stream = self._channel.stream_stream(_METHOD)(metadata=told)
        self._outbox = _Outbox(stream.write, self._traffic)
        self._reader = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: Any) -> None:
        code, why = grpc.StatusCode.OK, "the connection ended"
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                self._traffic.add(message)
                for frame in decoded(_FRAMES, message, "frames", self.name):
                    if frame.call in self._calls:
                        self._calls[frame.call].put_nowait(frame)
        except grpc.aio.AioRpcError as error:
            code, why = error.code(), error.details() or why
        except ContractError as error:
            why = error.what
        finally:
            outbox, self._outbox = self._outbox, None
            for inbox in self._calls.values():
                inbox.put_nowait(self._ended(code, why))
            if outbox is not None:
                await outbox.close()

    def _ended(self, code: grpc.StatusCode, why: str) -> GcoreError:
        if code in _REFUSALS:
            return ContractError("refused the connection", where=self.name, why=why, process=self.name)
        return WorkerDied("the process is gone", where=self.name, why=why, process=self.name)

    async def _drop_channel(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def close(self) -> None:
        tasks = [task for task in (self._connecting, self._reader) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._drop_channel()


def _fitting(body: bytes, what: str, where: str) -> msgspec.Raw:
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise ContractError(f"{what} has {len(body)} bytes, the limit is {MESSAGE_LIMIT_BYTES}", where=where)
    return msgspec.Raw(body)


def _batches(frames: list[Frame]) -> Iterator[list[Frame]]:
    """The frames in order, in messages of at most ``MESSAGE_LIMIT_BYTES`` of bodies each."""
    batch: list[Frame] = []
    nbytes = 0
    for frame in frames:
        size = len(memoryview(frame.body))
        if batch and nbytes + size > MESSAGE_LIMIT_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(frame)
        nbytes += size
    yield batch


async def _within(awaitable: Any, timeout_s: float) -> Any:
    async with asyncio.timeout(timeout_s):
        return await awaitable


def _target(address: str) -> str:
    """The gRPC target of an address; raises AddressError for one that others could reach."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        if len(rest.encode()) > _SOCKET_PATH_LIMIT:
            raise AddressError(
                f"the socket path has {len(rest.encode())} bytes, the system allows {_SOCKET_PATH_LIMIT}",
                where=rest,
                todo="set launcher.config.socket_dir to a shorter directory, for example /tmp",
            )
        return address
    host = rest.rpartition(":")[0]
    if scheme == "tcp" and host in ("127.0.0.1", "[::1]", "localhost"):
        return rest
    raise AddressError(
        "refused to use an address that other machines can reach without TLS",
        where=address,
        todo="use a loopback address or a unix socket",
    )


def check_free(address: str) -> None:
    """Raises AddressError when something else listens at the address, or it is too long or not private."""
    _target(address)
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        if os.path.exists(rest):
            os.unlink(rest)  # of a worker that was started again; the directory is private to the run
        return
    host, _, port = rest.rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _in_use(address) from error
            raise


def _in_use(address: str) -> AddressError:
    return AddressError(
        "the address is in use",
        where=address,
        why="another program, or a run that has not ended, listens there",
        todo="set launcher.config.port to a free port, or leave it out to use unix sockets",
    )
