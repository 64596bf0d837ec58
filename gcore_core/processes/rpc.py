"""Calls between processes: frames over one bidirectional grpc.aio stream per pair, on unix sockets.

Frames written in one turn of the event loop travel in one gRPC message, so a call costs far less than a unary one.
Addresses are ``unix:/path`` or ``tcp:127.0.0.1:port``; anything else is refused, as long as there is no TLS. Every
stream carries the run's secret and the version of gcore-core, which both sides compare.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
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
    encode,
    from_wire,
    to_wire,
)

T = TypeVar("T")
CALL, CANCEL, ITEM, REPLY, ERROR, PROGRESS = range(6)
_METHOD = "/gcore/session"
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.enable_http_proxy", 0),
]
_SOCKET_PATH_LIMIT = 107


class Frame(msgspec.Struct, array_like=True, frozen=True):
    call: int
    kind: int
    method: str = ""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


_decode = msgspec.msgpack.Decoder(list[Frame]).decode


class _Outbox:
    """Collects frames and writes them in one message per turn of the loop."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write, self._frames, self._ready = write, [], asyncio.Event()  # type: ignore[var-annotated]
        self._task = asyncio.ensure_future(self._run())

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._ready.set()

    async def _run(self) -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            frames, self._frames = self._frames, []
            await self._write(encode(frames))

    async def close(self) -> None:
        if self._frames:
            await asyncio.sleep(0)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class RpcNetwork:
    """Peers by name; ``addresses`` maps every name this process may talk to."""

    def __init__(self, addresses: dict[str, str], secret: bytes, timeout_s: float = 30.0) -> None:
        self.addresses, self._secret, self._timeout_s = addresses, secret, timeout_s
        self._peers: dict[str, RpcPeer] = {}
        self._servers: list[grpc.aio.Server] = []

    def peer(self, name: str) -> Peer:
        if name not in self._peers:
            self._peers[name] = RpcPeer(name, _target(self.addresses[name]), self._secret, self._timeout_s)
        return self._peers[name]

    async def serve(self, name: str, service: Service) -> None:
        """Raises AddressError when the address is taken, too long or not private."""
        address = self.addresses[name]
        target = _target(address)
        _check_free(address)
        server = grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0)])
        session = grpc.stream_stream_rpc_method_handler(_Session(service, self._secret).serve)
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

    def __init__(self, service: Service, secret: bytes) -> None:
        self._service, self._secret = service, secret

    async def serve(self, requests: Any, context: Any) -> None:
        await self._admit(context)
        outbox = _Outbox(context.write)
        running: dict[int, asyncio.Task[None]] = {}
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                for frame in _decode(message):
                    if frame.kind == CALL:
                        task = asyncio.ensure_future(self._run(frame, outbox))
                        running[frame.call] = task
                        task.add_done_callback(partial(_drop, running, frame.call))
                    elif frame.kind == CANCEL and frame.call in running:
                        running[frame.call].cancel()
        finally:
            for task in list(running.values()):
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

    async def _run(self, frame: Frame, outbox: _Outbox) -> None:
        call = Call(lambda: outbox.put(Frame(frame.call, PROGRESS)))

        async def emit(item: bytes) -> None:
            outbox.put(Frame(frame.call, ITEM, "", msgspec.Raw(item)))

        try:
            reply = await self._service.handle(frame.method, frame.body, call, emit)
            outbox.put(Frame(frame.call, REPLY, "", msgspec.Raw(reply)))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # isolation point: it is re-raised at the caller
            outbox.put(Frame(frame.call, ERROR, "", msgspec.Raw(encode(to_wire(error, self._service.name)))))


class RpcPeer:
    """The client's end. Connects on first use; a broken stream fails its calls and the next call connects anew."""

    def __init__(self, name: str, target: str, secret: bytes, timeout_s: float) -> None:
        self.name = name
        self._target, self._secret, self._timeout_s = target, secret, timeout_s
        self._calls: dict[int, asyncio.Queue[Frame | GcoreError]] = {}
        self._ids = itertools.count(1)
        self._outbox: _Outbox | None = None
        self._channel: grpc.aio.Channel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def call(self, method: str, request: Any, reply: type[T], *, deadline_s: float = 60.0) -> T:
        async for frame in self._exchange(method, request, deadline_s):
            if frame.kind == REPLY:
                return msgspec.msgpack.decode(frame.body, type=reply)
        raise ContractError(f"{method} gave no reply", where=self.name)

    async def stream(self, method: str, request: Any, item: type[T], *, deadline_s: float = 60.0) -> AsyncIterator[T]:
        decoder = msgspec.msgpack.Decoder(item)
        async for frame in self._exchange(method, request, deadline_s):
            if frame.kind == ITEM:
                yield decoder.decode(frame.body)

    async def _exchange(self, method: str, request: Any, deadline_s: float) -> AsyncIterator[Frame]:
        outbox = await self._connected()
        number, inbox = next(self._ids), asyncio.Queue[Frame | GcoreError]()
        self._calls[number] = inbox
        outbox.put(Frame(number, CALL, method, msgspec.Raw(encode(request))))
        done = False
        try:
            while not done:
                try:
                    frame = inbox.get_nowait() if not inbox.empty() else await _within(inbox.get(), deadline_s)
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"no sign of progress for {deadline_s:g} s in {method}", where=self.name
                    ) from None
                if isinstance(frame, GcoreError):
                    done = True
                    raise frame
                if frame.kind == ERROR:
                    done = True
                    raise from_wire(msgspec.msgpack.decode(frame.body, type=RemoteFailure))
                done = frame.kind == REPLY
                if frame.kind != PROGRESS:
                    yield frame
        finally:
            del self._calls[number]
            if not done and self._outbox is outbox:
                outbox.put(Frame(number, CANCEL))

    async def _connected(self) -> _Outbox:
        async with self._connecting:
            if self._outbox is None:
                await self._drop_channel()
                self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
                try:
                    await _within(self._channel.channel_ready(), self._timeout_s)
                except TimeoutError:
                    raise WorkerDied(f"nobody answers at {self._target}", where=self.name) from None
                told = (
                    ("g-core-secret", self._secret.hex()),
                    ("g-core-version", __version__),
                    ("g-core-python", sys.executable),
                )
                stream = self._channel.stream_stream(_METHOD)(metadata=told)
                self._outbox = _Outbox(stream.write)
                self._reader = asyncio.ensure_future(self._read(stream))
            return self._outbox

    async def _read(self, stream: Any) -> None:
        why = "the connection ended"
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                for frame in _decode(message):
                    if frame.call in self._calls:
                        self._calls[frame.call].put_nowait(frame)
            if (code := await stream.code()) != grpc.StatusCode.OK:
                why = f"{code.name.lower().replace('_', ' ')}: {await stream.details()}"
        except grpc.aio.AioRpcError as error:
            why = error.details() or why
        finally:
            outbox, self._outbox = self._outbox, None
            for inbox in self._calls.values():
                inbox.put_nowait(WorkerDied(f"{self.name} is gone", where=self.name, why=why, process=self.name))
            if outbox is not None:
                await outbox.close()

    async def _drop_channel(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._drop_channel()


def _drop(running: dict[int, asyncio.Task[None]], call: int, task: asyncio.Task[None]) -> None:
    running.pop(call, None)


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


def _check_free(address: str) -> None:
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
