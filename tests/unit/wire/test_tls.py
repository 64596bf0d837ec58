"""Calls over TLS between two networks of this process, and everybody whom TLS must keep out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from gcore_nodes import identity as identity_module
from gcore_nodes.identity import make_identity, server_context

from gcore_core import __version__
from gcore_core.contract.errors import AddressError, ConfigError, ContractError, WorkerDied
from gcore_core.contract.installing import install_command
from gcore_core.contract.launching import Endpoint, Peer, StreamEndpoint, Traffic
from gcore_core.wire import sockets, tls
from gcore_core.wire.frames import CALL, Connection, Frame
from gcore_core.wire.framing import framed
from gcore_core.wire.proof import Greeting
from gcore_core.wire.retry import insist
from gcore_core.wire.service import MESSAGE_LIMIT_BYTES, Call, Service, encode
from gcore_core.wire.sockets import RpcNetwork, check_free, check_private

SECRET = b"s" * 32
NAME = "worker.3"
IDENTITY = make_identity()
OTHER_IDENTITY = make_identity()

ECHO = Endpoint("echo", bytes, bytes)
HANG = Endpoint("hang", NoneType, NoneType)
PARTS = StreamEndpoint("parts", int, bytes)

SETTLED_S = 30.0  # what must happen soon has happened within it, on a busy machine too


class Server:
    """Serves what the tests call, and counts what it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.hanging = asyncio.Event()
        self.service = Service(NAME)
        self.service.add(ECHO, self.echo)
        self.service.add(HANG, self.hang)
        self.service.add(PARTS, self.parts)

    async def echo(self, request: bytes, call: Call) -> bytes:
        self.asked += 1
        return request

    async def hang(self, request: None, call: Call) -> None:
        self.asked += 1
        self.hanging.set()
        await asyncio.Event().wait()

    async def parts(self, request: int, call: Call) -> AsyncGenerator[bytes, None]:
        self.asked += 1
        for number in range(request):
            yield part(number)


def part(number: int) -> bytes:
    """Item ``number`` of a stream; some fit into one record of TLS, others take hundreds."""
    return random.Random(number).randbytes([3, 20_000, 1 << 20, 3 << 20][number % 4])


@dataclass
class Site:
    """A server under TLS on a port of this machine."""

    port: int
    network: RpcNetwork
    server: Server = field(default_factory=Server)

    @property
    def address(self) -> str:
        return f"tls:127.0.0.1:{self.port}"

    def untouched(self) -> bool:
        """Whether nobody has sent or got a message."""
        return self.network.traffic.messages == 0 and self.server.asked == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.asynccontextmanager
async def served(port: int = 0) -> AsyncIterator[Site]:
    port = port or free_port()
    network = RpcNetwork({NAME: f"tls:127.0.0.1:{port}"}, SECRET, identity=IDENTITY)
    site = Site(port, network)
    await network.serve(NAME, site.server.service)
    try:
        yield site
    finally:
        await network.close()


@contextlib.asynccontextmanager
async def reached(
    port: int,
    *,
    secret: bytes = SECRET,
    identity: bytes = IDENTITY,
    timeout_s: float = 20.0,
) -> AsyncIterator[Peer]:
    addresses = {NAME: f"tls:127.0.0.1:{port}"}
    network = RpcNetwork(addresses, secret, timeout_s, identity=identity)
    try:
        yield network.peer(NAME)
    finally:
        await network.close()


async def until(holds: Callable[[], object]) -> None:
    """Lets the loop run until a condition holds."""
    async with asyncio.timeout(SETTLED_S):
        while not holds():
            await asyncio.sleep(0.005)


# -- calls and streams -----------------------------------------------------------------------------


async def test_messages_of_any_length_come_back_as_they_were() -> None:
    draw = random.Random(1)
    lengths = [0, 1, 4095, 16_384, (1 << 18) - 4, 1 << 18, (1 << 18) + 1, 12 << 20]
    async with served() as site, reached(site.port) as peer:
        for length in lengths:
            message = draw.randbytes(length)
            assert await peer.call(ECHO, message) == message
        longest = bytes(MESSAGE_LIMIT_BYTES - 16)
        assert await peer.call(ECHO, longest) == longest


async def test_calls_and_streams_run_side_by_side_over_one_connection() -> None:
    draw = random.Random(2)
    messages = [draw.randbytes(draw.choice([10, 70_000, 2 << 20])) for _ in range(24)]

    async def drain(peer: Peer) -> list[bytes]:
        return [item async for item in peer.stream(PARTS, 13)]

    async with served() as site, reached(site.port) as peer:
        echoes = asyncio.gather(*(peer.call(ECHO, message) for message in messages))
        streams = asyncio.gather(*(drain(peer) for _ in range(3)))
        assert await echoes == messages
        assert await streams == [[part(number) for number in range(13)]] * 3


async def test_a_process_serves_its_machine_by_a_unix_socket_and_others_by_tls() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as directory:
        here, everywhere = {NAME: f"unix:{directory}/w"}, {NAME: f"tls:127.0.0.1:{port}"}
        network = RpcNetwork(here, SECRET, identity=IDENTITY, public=everywhere)
        near = RpcNetwork(here, SECRET)
        await network.serve(NAME, Server().service)
        try:
            assert await near.peer(NAME).call(ECHO, b"near") == b"near"
            async with reached(port) as far:
                assert await far.call(ECHO, b"far") == b"far"
        finally:
            await near.close()
            await network.close()


async def test_a_public_address_is_served_by_its_own_process_only() -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as directory:
        public = {"worker.4": f"tls:127.0.0.1:{port}"}
        network = RpcNetwork(
            {NAME: f"unix:{directory}/w"}, SECRET, identity=IDENTITY, public=public
        )
        await network.serve(NAME, Server().service)
        try:
            check_free(public["worker.4"], IDENTITY)
        finally:
            await network.close()


async def test_a_server_that_is_started_again_is_reached_again() -> None:
    port = free_port()
    async with reached(port) as peer:
        for number in range(3):
            async with served(port):
                assert await insist(peer, ECHO, b"%d" % number, 60.0) == b"%d" % number


# -- third parties ---------------------------------------------------------------------------------

Attempt = Callable[[Site], Awaitable[bytes]]


async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Reads until the server ends the connection."""
    received = b""
    async with asyncio.timeout(SETTLED_S):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                received += data
    writer.close()
    return received


def request_frames(secret: bytes = SECRET) -> bytes:
    """What a client sends that is let in: a greeting, and a call."""
    greeting = Greeting(secret, __version__, "-")
    call = Frame(1, CALL, "echo", msgspec.Raw(encode(b"let me in")))
    return framed(encode(greeting)) + framed(encode([call]))


async def spoken_over(site: Site, context: ssl.SSLContext, sent: bytes) -> bytes:
    """Connects by TLS, sends, and returns what is answered; nothing where TLS itself fails."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", site.port, ssl=context, server_hostname=""
        )
    except OSError:
        return b""
    writer.write(sent)
    return await read_all(reader, writer)


def lax_context(identity: bytes = b"") -> ssl.SSLContext:
    """A client that believes every server, with the certificate of ``identity`` or with none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if identity:
        with tempfile.NamedTemporaryFile() as file:
            file.write(identity)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def signed_by_the_run() -> bytes:
    """A key of its own and a certificate that the run's certificate has signed."""
    run_key = serialization.load_pem_private_key(IDENTITY, None)
    run_certificate = x509.load_pem_x509_certificate(IDENTITY[IDENTITY.index(b"-----BEGIN C") :])
    assert isinstance(run_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "guest")]))
        .issuer_name(run_certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(identity_module._VALID_FROM)
        .not_valid_after(identity_module._VALID_UNTIL)
        .sign(run_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, private, serialization.NoEncryption()) + (
        certificate.public_bytes(pem) + run_certificate.public_bytes(pem)
    )


async def plain_text(site: Site) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(request_frames())
    return await read_all(reader, writer)


async def no_certificate(site: Site) -> bytes:
    return await spoken_over(site, lax_context(), request_frames())


async def certificate_of_another_run(site: Site) -> bytes:
    return await spoken_over(site, lax_context(OTHER_IDENTITY), request_frames())


async def certificate_signed_by_the_run(site: Site) -> bytes:
    return await spoken_over(site, lax_context(signed_by_the_run()), request_frames())


async def an_older_tls(site: Site) -> bytes:
    context = lax_context(IDENTITY)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return await spoken_over(site, context, request_frames())


@pytest.mark.parametrize(
    "attempt",
    [
        plain_text,
        no_certificate,
        certificate_of_another_run,
        certificate_signed_by_the_run,
        an_older_tls,
    ],
)
async def test_who_has_no_certificate_of_the_run_gets_nothing(attempt: Attempt) -> None:
    async with served() as site:
        assert await attempt(site) == b""
        assert site.untouched()
        async with reached(site.port) as peer:  # and the server goes on
            assert await peer.call(ECHO, b"still there") == b"still there"


async def test_the_attempts_would_get_an_answer_with_the_run_s_certificate() -> None:
    """So what keeps them out is the certificate, not a mistake in what they send."""
    async with served() as site:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", site.port, ssl=lax_context(IDENTITY), server_hostname=""
        )
        writer.write(request_frames())
        async with asyncio.timeout(SETTLED_S):
            assert await reader.readexactly(5) == framed(encode(""))
            assert b"let me in" in await reader.read(1 << 16)
        assert site.server.asked == 1
        writer.close()


async def test_with_the_certificate_and_a_wrong_secret_only_the_refusal_is_answered() -> None:
    async with served() as site:
        answer = await spoken_over(site, lax_context(IDENTITY), request_frames(b"t" * 32))
        assert answer == framed(encode("wrong or missing run secret"))
        assert site.server.asked == 0
        assert site.network.traffic.messages == 2  # the greeting and its answer, and no frame
        async with reached(site.port, secret=b"t" * 32) as peer:
            with pytest.raises(ContractError, match="wrong or missing run secret"):
                await peer.call(ECHO, b"")
        async with reached(site.port) as peer:
            assert await peer.call(ECHO, b"still there") == b"still there"


@dataclass
class Wire:
    """Passes bytes on between a client and a server, as whoever owns the network could.

    target: the server's port.
    cut_after: bytes from the server to the client after which the connection is cut.
    flip_at: the byte from the server to the client in which one bit is turned.
    to_server: all that the client has sent.
    """

    target: int
    cut_after: int = 1 << 62
    flip_at: int = 1 << 62
    port: int = 0
    to_server: bytearray = field(default_factory=bytearray)
    _n_answered: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers += [writer, server_writer]
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._forth(reader, server_writer), self._back(server_reader, writer)
            )
        for end in (writer, server_writer):
            end.transport.abort()

    async def _forth(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 14):
            self.to_server += data
            server.write(data)
            await server.drain()
        raise ConnectionResetError

    async def _back(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while data := bytearray(await reader.read(1 << 14)):
            place = self.flip_at - self._n_answered
            if 0 <= place < len(data):
                data[place] ^= 1
            left = self.cut_after - self._n_answered
            self._n_answered += len(data)
            client.write(data[: max(0, left)])
            await client.drain()
            if self._n_answered >= self.cut_after:
                self.cut_after = 1 << 62  # the next connection lasts
                break
        raise ConnectionResetError


async def test_a_recorded_session_that_is_sent_again_gets_nothing() -> None:
    """Whole, and with its parts sent as the server answers."""
    async with served() as site:
        async with Wire(site.port).open() as wire, reached(wire.port) as peer:
            assert await peer.call(ECHO, b"spend it") == b"spend it"
        assert site.server.asked == 1
        n_messages = site.network.traffic.messages
        assert len(wire.to_server) > 500
        for size in (len(wire.to_server), 300):
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            for start in range(0, len(wire.to_server), size):
                writer.write(wire.to_server[start : start + size])
                with contextlib.suppress(OSError):
                    await writer.drain()
            received = await read_all(reader, writer)
            assert b"spend it" not in received
        assert site.server.asked == 1
        assert site.network.traffic.messages == n_messages
        async with reached(site.port) as peer:
            assert await peer.call(ECHO, b"still there") == b"still there"


async def test_a_listener_on_the_network_reads_neither_the_secret_nor_a_message() -> None:
    async with served() as site:
        async with Wire(site.port).open() as wire, reached(wire.port) as peer:
            await peer.call(ECHO, b"a message of some length")
        assert SECRET not in wire.to_server
        assert b"a message" not in wire.to_server
        assert b"g-core" not in wire.to_server  # nor what the certificate says


@dataclass
class Impostor:
    """Listens where a process of the run should, and keeps what it is sent."""

    context: ssl.SSLContext | None
    received: bytearray = field(default_factory=bytearray)
    connections: int = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._speak, "127.0.0.1", 0, ssl=self.context)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError):
            self.received += await reader.read(1 << 16)
        writer.write(framed(encode("")))
        writer.close()


async def test_a_client_tells_nothing_to_a_server_of_another_run_and_says_so_at_once() -> None:
    context = tls.contexts(OTHER_IDENTITY).server
    context.verify_mode = ssl.CERT_NONE  # it takes everybody
    impostor = Impostor(context)
    async with impostor.open() as port, reached(port) as peer:
        with pytest.raises(ContractError, match="its certificate is not the run's"):
            await peer.call(ECHO, b"for the run")
    assert not impostor.received


async def test_a_client_tells_nothing_to_a_server_that_speaks_plain_text() -> None:
    impostor = Impostor(None)
    async with impostor.open() as port, reached(port, timeout_s=1.0) as peer:
        with pytest.raises(WorkerDied, match=f"nobody answers at tls:127.0.0.1:{port}\n.*SSL"):
            await peer.call(ECHO, b"for the run")
    assert impostor.connections
    assert SECRET not in impostor.received
    assert b"for the run" not in impostor.received


async def test_a_client_refuses_an_older_tls() -> None:
    context = tls.contexts(IDENTITY).server
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    impostor = Impostor(context)
    async with impostor.open() as port, reached(port, timeout_s=1.0) as peer:
        with pytest.raises(WorkerDied, match="nobody answers at tls:"):
            await peer.call(ECHO, b"for the run")
    assert not impostor.received


# -- garbage and silence ---------------------------------------------------------------------------


def client_hello() -> bytes:
    """The first bytes of a sound client."""
    outgoing = ssl.MemoryBIO()
    stream = tls.contexts(IDENTITY).client.wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        stream.do_handshake()
    return outgoing.read()


def garbage(draw: random.Random, hello: bytes) -> bytes:
    """Bytes that nobody should send: of any kind, or nearly a handshake of TLS."""
    mutated = bytearray(hello)
    for _ in range(draw.randint(1, 8)):
        mutated[draw.randrange(len(mutated))] = draw.randrange(256)
    record = bytes([draw.choice([20, 21, 22, 23, 24]), 3, draw.randrange(5)])
    length = draw.randrange(1 << 16).to_bytes(2, "big")
    return draw.choice(
        [
            b"",
            draw.randbytes(draw.randrange(1, 50_000)),
            bytes(mutated),
            hello[: draw.randrange(len(hello))],
            hello + draw.randbytes(draw.randrange(1, 2000)),
            record + length + draw.randbytes(draw.randrange(1, 20_000)),
            hello * draw.randint(2, 4),
        ]
    )


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_garbage_at_the_port_leaves_the_server_serving_and_nothing_open() -> None:
    draw = random.Random(11)
    hello = client_hello()
    async with served() as site:
        async with reached(site.port) as peer:
            await peer.call(ECHO, b"warm")
        ((_, sessions),) = site.network._servers
        await until(lambda: not sessions)
        n_messages = site.network.traffic.messages
        n_files, tasks = open_files(), asyncio.all_tasks()
        for round_ in range(20):

            async def throw(sent: bytes, *, waits: bool) -> None:
                reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
                writer.write(sent)
                if waits:  # for the answer, if the server has one
                    with contextlib.suppress(OSError, TimeoutError):
                        async with asyncio.timeout(0.05):
                            await reader.read(1 << 16)
                writer.transport.abort() if draw.random() < 0.3 else writer.close()

            await asyncio.gather(
                *(throw(garbage(draw, hello), waits=draw.random() < 0.5) for _ in range(20))
            )
            async with reached(site.port) as peer:
                assert await peer.call(ECHO, b"%d" % round_) == b"%d" % round_
            n_messages += 4  # a greeting, a call, and an answer to each
        await until(lambda: not sessions)
        await until(lambda: asyncio.all_tasks() <= tasks)
        await until(lambda: open_files() <= n_files)
        assert site.network.traffic.messages == n_messages
        assert site.server.asked == 21


async def test_a_handshake_that_is_not_finished_in_time_ends_with_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 0.2)
    hello = client_hello()
    async with served() as site:
        ((_, sessions),) = site.network._servers
        tasks = asyncio.all_tasks()
        for sent in (b"", hello[:100], hello):
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(sent)
            received = await read_all(reader, writer)
            assert (received != b"") == (sent == hello)  # half a greeting of TLS is not answered
            assert not sessions
        await until(lambda: asyncio.all_tasks() <= tasks)
        assert site.untouched()


async def test_who_shakes_hands_and_then_says_nothing_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "GREETING_S", 0.2)
    async with served() as site:
        assert await spoken_over(site, lax_context(IDENTITY), b"") == b""
        ((_, sessions),) = site.network._servers
        await until(lambda: not sessions)
        assert site.untouched()


async def test_who_shakes_hands_while_the_server_closes_is_not_served() -> None:
    async with served() as site:
        ((_, sessions),) = site.network._servers
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        stream = tls.contexts(IDENTITY).client.wrap_bio(incoming, outgoing)
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        with contextlib.suppress(ssl.SSLWantReadError):
            stream.do_handshake()
        writer.write(outgoing.read())
        while True:
            incoming.write(await reader.read(1 << 16))
            with contextlib.suppress(ssl.SSLWantReadError):
                stream.do_handshake()
                break
        await site.network.close()  # the client's last word is still to come
        stream.write(request_frames())
        writer.write(outgoing.read())
        incoming.write(await read_all(reader, writer))
        incoming.write_eof()
        with contextlib.suppress(ssl.SSLError):
            assert stream.read(1 << 16) == b""
        await until(lambda: not sessions)
        assert site.untouched()


async def test_what_tls_reads_while_a_connection_is_ended_reaches_nobody() -> None:
    """asyncio reads once more from a TLS stream that is closed, before it says farewell."""
    received: list[bytes] = []
    lost: list[str] = []
    connection = Connection(received.append, lost.append, bytearray(1 << 12), Traffic())

    def arrive(data: bytes) -> None:
        connection.get_buffer(-1)[: len(data)] = data
        connection.buffer_updated(len(data))

    class Stream(asyncio.Transport):
        closing = False

        def is_closing(self) -> bool:
            return self.closing

        def close(self) -> None:
            self.closing = True
            arrive(b"ly")

        def abort(self) -> None: ...

    connection.connection_made(Stream())
    arrive(framed(b"early"))
    arrive(framed(b"lately")[:-2])  # the rest comes with the close
    connection.end()
    assert received == [b"early"]


# -- connections that break ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2_000_000, 12 << 20])
async def test_a_connection_cut_in_a_message_fails_all_calls_over_it(length: int) -> None:
    async with served() as site:
        async with Wire(site.port, cut_after=length // 2).open() as wire:
            async with reached(wire.port) as peer:
                hanging = asyncio.ensure_future(peer.call(HANG, None))
                await site.server.hanging.wait()
                with pytest.raises(WorkerDied, match=rf"{NAME}: the process is gone"):
                    await peer.call(ECHO, bytes(length))
                with pytest.raises(WorkerDied, match=rf"{NAME}: the process is gone"):
                    await hanging
                # The next call makes a connection of its own.
                assert await peer.call(ECHO, b"again") == b"again"


async def test_a_connection_that_is_ended_without_a_farewell_fails_its_calls() -> None:
    """Who cuts the wire cannot make a message look shorter than it is."""
    async with served() as site:
        async with Wire(site.port).open() as wire, reached(wire.port) as peer:
            hanging = asyncio.ensure_future(peer.call(HANG, None))
            await site.server.hanging.wait()
            for writer in wire._writers:
                writer.write_eof()  # TCP's end of a stream, not that of TLS
            with pytest.raises(WorkerDied, match="the process is gone"):
                await hanging


async def test_one_bit_that_is_changed_on_its_way_ends_the_connection() -> None:
    async with served() as site:
        async with Wire(site.port, flip_at=500_000).open() as wire, reached(wire.port) as peer:
            with pytest.raises(WorkerDied, match="the process is gone"):
                await peer.call(ECHO, bytes(1_000_000))
            assert await peer.call(ECHO, b"again") == b"again"


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "tls:0.0.0.0:7000",
        "tls:[::]:7000",
        "tls::7000",
        "tls:7000",
        "tls:10.77.0.1:",
        "tls:10.77.0.1:0",
        "tls:10.77.0.1:65536",
        "tls:10.77.0.1:seven",
    ],
)
def test_a_tls_address_names_one_machine_and_a_port(address: str) -> None:
    with pytest.raises(AddressError, match="not an address of one machine") as caught:
        check_private(address, IDENTITY)
    assert caught.value.where == address


@pytest.mark.parametrize("address", ["tls:10.77.0.1:7000", "tls:[fd00::1]:7000", "tls:node01:7000"])
def test_a_tls_address_needs_an_identity(address: str) -> None:
    check_private(address, IDENTITY)
    with pytest.raises(AddressError, match="refused to use TLS without the run's certificate"):
        RpcNetwork({NAME: address}, SECRET).peer(NAME)


async def test_nothing_is_served_when_the_public_address_may_not_be() -> None:
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as directory:
        for public in ("tcp:10.77.0.1:7000", "tls:0.0.0.0:7000"):
            network = RpcNetwork(
                {NAME: f"unix:{directory}/w"}, SECRET, identity=IDENTITY, public={NAME: public}
            )
            with pytest.raises(AddressError):
                await network.serve(NAME, Server().service)
        assert not os.listdir(directory)


def test_an_identity_does_not_make_plain_tcp_safe() -> None:
    with pytest.raises(AddressError, match="other machines can reach without TLS"):
        RpcNetwork({NAME: "tcp:10.77.0.1:7000"}, SECRET, identity=IDENTITY).peer(NAME)


async def test_an_address_that_cannot_be_had_is_reported_as_such() -> None:
    async with served() as site:
        with pytest.raises(AddressError, match="the address is in use") as caught:
            await RpcNetwork({NAME: site.address}, SECRET, identity=IDENTITY).serve(
                NAME, Server().service
            )
        with pytest.raises(AddressError, match="the address is in use"):
            check_free(site.address, IDENTITY)
    assert "unix" not in caught.value.todo
    elsewhere = "tls:192.0.2.7:7000"  # of a network that is kept for examples
    for attempt in (
        RpcNetwork({NAME: elsewhere}, SECRET, identity=IDENTITY).serve(NAME, Server().service),
        asyncio.to_thread(check_free, elsewhere, IDENTITY),
    ):
        with pytest.raises(AddressError, match="this machine does not have the address") as caught:
            await attempt
        assert caught.value.where == elsewhere


# -- the identity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "identity",
    [
        b"",
        b"nonsense",
        IDENTITY[: IDENTITY.index(b"-----BEGIN C")],
        IDENTITY[IDENTITY.index(b"-----BEGIN C") :],
        IDENTITY[: IDENTITY.index(b"-----BEGIN C")]
        + OTHER_IDENTITY[OTHER_IDENTITY.index(b"-----BEGIN C") :],
        IDENTITY.replace(b"MII", b"\xff\xff\xff"),
    ],
    ids=["empty", "nonsense", "key alone", "certificate alone", "of two runs", "not ASCII"],
)
def test_an_identity_that_is_none_is_refused_without_being_shown(identity: bytes) -> None:
    with pytest.raises(ContractError, match="the run's identity is not the PEM") as caught:
        tls.contexts(identity)
    assert caught.value.__suppress_context__
    key_text = IDENTITY.splitlines()[1].decode()
    assert key_text not in f"{caught.value}{caught.value.facts}"


def test_contexts_leave_no_file_open() -> None:
    n_files = open_files()
    contexts = [tls.contexts(IDENTITY) for _ in range(5)]
    with pytest.raises(ContractError):
        tls.contexts(b"nonsense")
    assert open_files() == n_files
    assert {context.server.minimum_version for context in contexts} == {ssl.TLSVersion.TLSv1_3}


def test_each_identity_is_another_and_its_key_is_of_p_256() -> None:
    assert IDENTITY.splitlines()[1] != OTHER_IDENTITY.splitlines()[1]
    key = serialization.load_pem_private_key(IDENTITY, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP256R1)


def test_without_the_package_an_identity_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match="needs the package cryptography") as caught:
        make_identity()
    assert caught.value.todo == install_command("cryptography>=44")


def test_only_who_makes_an_identity_imports_cryptography() -> None:
    """Not a worker, nor an agent, nor who connects and serves."""
    program = """
import asyncio, sys
from gcore_core.kits import launching
from gcore_core.node import worker
from gcore_nodes import agent
from gcore_core.wire import tls
from gcore_core.wire.service import Service

async def serve(address, identity):
    network = launching.RpcNetwork({"w": address}, b"s", identity=identity)
    await network.serve("w", Service("w"))
    await network.close()

asyncio.run(serve(sys.argv[1], sys.stdin.buffer.read()))
print("cryptography" in sys.modules)
from gcore_nodes.identity import make_identity
make_identity()
print("cryptography" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, f"tls:127.0.0.1:{free_port()}"],
        input=IDENTITY,
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert ended.stdout.split() == [b"False", b"True"]


def test_a_server_context_lets_in_clients_without_a_certificate() -> None:
    """They see the identity's certificate, and that its owner has its key."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cadata=tls.certificate_of(IDENTITY).decode("ascii"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async def go() -> bytes:
        context = server_context(IDENTITY)
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            content = await reader.read()
            writer.close()
            return content

    assert asyncio.run(go()) == b"hello"
    with pytest.raises(ContractError, match="identity"):
        server_context(b"none")
    assert b"PRIVATE" not in tls.certificate_of(IDENTITY)
