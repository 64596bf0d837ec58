"""Content between nodes: every byte arrives, over connections that break too, and nobody else gets
or alters any.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import secrets
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gcore_core.contract.errors import (
    AddressError,
    ConfigError,
    ContractError,
    DataError,
    WorkerDied,
)
from gcore_core.runtime.rpc.tls import contexts
from gcore_core.runtime.store import bulk
from gcore_core.runtime.store.bulk import (
    PART_BYTES,
    BulkClient,
    BulkServer,
    PushedContent,
    Region,
    What,
)
from tests.support.wires import Wire, free_port, make_identity

SECRET = b"s" * 32
SIZE = 3 * PART_BYTES + 12_345


@pytest.fixture(scope="module")
def identity() -> bytes:
    return make_identity()


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as place:
        yield Path(place)


@pytest.fixture(params=["unix", "tcp", "tls"])
def address(request: pytest.FixtureRequest, short: Path) -> str:
    if request.param == "unix":
        return f"unix:{short}/bulk"
    return f"{request.param}:127.0.0.1:{free_port()}"


@dataclass
class Sender:
    """A server of one file, whose content begins at byte 100."""

    server: BulkServer
    content: np.ndarray

    @property
    def what(self) -> What:
        return PushedContent("policy.0", 100, self.content.nbytes)


@contextlib.contextmanager
def sender(short: Path, address: str, identity: bytes = b"", size: int = SIZE) -> Iterator[Sender]:
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path = short / "content"
    path.write_bytes(secrets.token_bytes(100) + content.tobytes())

    def find(what: What) -> Region:
        assert isinstance(what, PushedContent)
        if what.worker != "policy.0":
            raise DataError(f"no worker {what.worker!r} pushes here")
        return Region(path, what.offset, what.nbytes)

    server = BulkServer("agent.0", address, SECRET, find, identity)
    server.start()
    try:
        yield Sender(server, content)
    finally:
        server.close()


def reader(
    address: str, identity: bytes = b"", secret: bytes = SECRET, **limits: Any
) -> BulkClient:
    return BulkClient({"agent.0": address}, secret, identity, **limits)


async def read(client: BulkClient, what: What, nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes, np.uint8)
    await client.read("agent.0", what, memory.data, lambda: None)
    return memory


@pytest.mark.parametrize("size", [0, 1, bulk._PIECE_BYTES, PART_BYTES, PART_BYTES + 1, SIZE])
@pytest.mark.parametrize("streams", [1, 3])
async def test_every_byte_arrives(
    size: int, streams: int, address: str, short: Path, identity: bytes
) -> None:
    client = reader(address, identity, streams=streams)
    with sender(short, address, identity, size) as sent:
        for _ in range(2):  # the second time over the same connections
            assert np.array_equal(await read(client, sent.what, size), sent.content)
        assert sent.server.sent_bytes == 2 * size
    client.close()


@pytest.mark.parametrize("can_map", [True, False])
async def test_every_byte_arrives_in_memory_that_is_not_mapped_yet(
    can_map: bool, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_map:  # as on other systems than Linux
        monkeypatch.setattr(bulk, "_madvise", None)
    address = f"unix:{short}/bulk"
    client = reader(address)
    with sender(short, address) as sent:
        memory = memoryview(mmap.mmap(-1, SIZE + 8))[8:]
        await client.read("agent.0", sent.what, memory, lambda: None, is_unmapped=True)
        assert np.array_equal(np.frombuffer(memory, np.uint8), sent.content)
    client.close()


async def test_many_reads_at_once_share_the_connections(short: Path) -> None:
    address = f"unix:{short}/bulk"
    wire = Wire(f"unix:{short}/wire", f"unix:{short}/bulk")
    with sender(short, address, size=1000) as sent, wire.opened():
        client = reader(wire.address, streams=2)
        found = await asyncio.gather(*(read(client, sent.what, 1000) for _ in range(50)))
        assert all(np.array_equal(one, sent.content) for one in found)
        assert wire.connections == 2
        client.close()


async def test_the_event_loop_has_no_work_for_a_piece(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of many pieces wakes the loop once, at its end."""
    loop = asyncio.get_running_loop()
    woken: list[Any] = []
    wake = loop.call_soon_threadsafe

    def counted(*arguments: Any) -> Any:
        woken.append(arguments)
        return wake(*arguments)

    monkeypatch.setattr(bulk, "_PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    with sender(short, f"unix:{short}/bulk") as sent:
        client = reader(f"unix:{short}/bulk")
        await read(client, sent.what, SIZE)
        assert len(woken) == 1
        client.close()


# -- who may read ----------------------------------------------------------------------------------


async def test_a_wrong_secret_gets_nothing(address: str, short: Path, identity: bytes) -> None:
    client = reader(address, identity, secret=b"t" * 32)
    with sender(short, address, identity) as sent:
        with pytest.raises(ContractError, match="agent.0: refused the connection") as caught:
            await read(client, sent.what, SIZE)
        assert caught.value.why == "wrong run secret"
        assert sent.server.sent_bytes == 0
    client.close()


async def test_a_server_that_does_not_know_the_secret_is_refused(short: Path) -> None:
    """It says that the reader's tag was right, and has none of its own."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{short}/bulk")
    listener.listen()

    def pretend() -> None:
        sock, _ = listener.accept()
        sock.sendall(bytes(32))
        sock.recv(100)
        sock.sendall(b"\1" + bytes(16))

    threading.Thread(target=pretend, daemon=True).start()
    client = reader(f"unix:{short}/bulk")
    with pytest.raises(ContractError) as caught:
        await read(client, PushedContent("policy.0", 0, 9), 9)
    assert caught.value.why == "it does not know the run secret itself"
    client.close()
    listener.close()


async def test_the_secret_is_never_sent(short: Path) -> None:
    heard: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{short}/bulk")
    listener.listen()

    def listen() -> None:
        sock, _ = listener.accept()
        sock.sendall(bytes(32))
        while data := sock.recv(1000):
            heard.append(data)
            sock.sendall(b"\0")

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    client = reader(f"unix:{short}/bulk")
    with pytest.raises(ContractError):
        await read(client, PushedContent("policy.0", 0, 9), 9)
    client.close()
    thread.join(10)
    assert len(b"".join(heard)) == 48
    assert SECRET[:8] not in b"".join(heard)
    listener.close()


async def test_without_the_runs_certificate_nothing_is_answered(
    short: Path, identity: bytes
) -> None:
    port = free_port()
    address = f"tls:127.0.0.1:{port}"
    with sender(short, address, identity) as sent:
        client = reader(address, make_identity())
        with pytest.raises(ContractError, match="refused the connection") as caught:
            await read(client, sent.what, SIZE)
        assert "TLS" in caught.value.why
        client.close()
        with pytest.raises(AddressError, match="TLS needs the run's identity"):
            await read(reader(address), sent.what, SIZE)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.verify_mode = ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            plain.sendall(bytes(48))
            assert _answer(plain) == b""
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            assert _answer(bare.wrap_socket(plain)) == b""
        assert sent.server.sent_bytes == 0


def _answer(sock: socket.socket) -> bytes:
    """What a server says; a TLS alert in plain is no content."""
    try:
        data = sock.recv(100)
    except OSError:
        return b""
    return b"" if data[:1] == b"\x15" else data


async def test_tls_of_older_versions_is_refused(short: Path, identity: bytes) -> None:
    address = f"tls:127.0.0.1:{free_port()}"
    with sender(short, address, identity):
        context = contexts(identity).client
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        _, place = bulk._place(address)
        with socket.create_connection(place, 10) as sock, pytest.raises(ssl.SSLError):
            context.wrap_socket(sock)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (PushedContent("policy.1", 100, 9), "no worker 'policy.1' pushes here"),
        (PushedContent("policy.0", 100, 1 << 40), "a reference points outside its slab"),
        (PushedContent("policy.0", -9, 9), "a reference points outside its slab"),
        (PushedContent("policy.0", 0, 8), "a read goes outside its reference"),
    ],
)
async def test_what_may_not_be_read_is_refused_and_the_next_read_works(
    what: What, message: str, short: Path
) -> None:
    address = f"unix:{short}/bulk"
    client = reader(address)
    with sender(short, address) as sent:
        with pytest.raises(DataError, match=message):
            await read(client, what, 9)
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
    client.close()


async def test_an_unknown_node_is_refused() -> None:
    with pytest.raises(ContractError, match="node agent.9: no address is known"):
        await reader("unix:/nowhere").read("agent.9", PushedContent("", 0, 0), memoryview(b""), int)


# -- what happens on the way -----------------------------------------------------------------------


@pytest.mark.parametrize("at", [10, 60, 5000, SIZE])
async def test_a_byte_that_was_altered_in_plain_is_refused(at: int, short: Path) -> None:
    """In the nonce, in the server's proof, in the content and in its last tag."""
    wire = Wire(f"unix:{short}/wire", f"unix:{short}/bulk", flip_at=at)
    with sender(short, f"unix:{short}/bulk") as sent, wire.opened():
        client = reader(wire.address, streams=1)
        with pytest.raises((DataError, ContractError), match="altered|refused"):
            await read(client, sent.what, SIZE)
        client.close()


def test_no_key_of_content_meets_a_nonce_twice() -> None:
    """Else whoever listens could make tags of their own: messages and pieces share one counter."""
    nonces = list[tuple[bytes, bytes]]()

    class Recorder:
        def __init__(self, key: bytes) -> None:
            self.key = key

        def encrypt(self, nonce: bytes, data: bytes, piece: memoryview) -> bytes:
            assert (len(self.key), len(nonce), data) == (32, 12, b"")
            nonces.append((self.key, nonce))
            return AESGCM(self.key).encrypt(nonce, data, piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "_content_mac", Recorder)
        directions = [
            bulk._Tags(SECRET, once, direction, is_plain=True)
            for once in (b"connection 1", b"connection 2")
            for direction in (b"client", b"server")
        ]
    tags = []
    for made in directions:
        for number in range(300):
            tags.append(made.next_of_content(memoryview(b"the same piece")))
            if number % 3:
                made.next(b"a message")
    assert len({key for key, _ in nonces}) == len(directions)
    assert len(set(nonces)) == len(set(tags)) == 300 * len(directions)


def test_without_cryptography_no_server_in_plain_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told when the agent starts, and TLS needs no such package."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(
        ConfigError, match=r"needs the package cryptography.*\n.*\n.*-m pip install .*\[tls\]'"
    ):
        BulkServer("agent.0", "tcp:127.0.0.1:1", SECRET, lambda what: Region(Path(), 0, 0))
    BulkServer(
        "agent.0", "tls:127.0.0.1:1", SECRET, lambda what: Region(Path(), 0, 0), make_identity()
    )


async def test_content_altered_before_it_was_sent_is_as_it_lies_there(short: Path) -> None:
    """What a sender sends is protected on its way; what it has is its reader's to digest."""
    with sender(short, f"unix:{short}/bulk") as sent:
        client = reader(f"unix:{short}/bulk")
        with open(short / "content", "r+b") as file:
            file.seek(100)
            file.write(bytes([sent.content[0] ^ 1]))
        found = await read(client, sent.what, SIZE)
        assert np.flatnonzero(found != sent.content).tolist() == [0]
        client.close()


async def test_a_read_goes_on_where_its_connection_broke(
    address: str, short: Path, identity: bytes
) -> None:
    scheme = address.partition(":")[0]
    near = f"unix:{short}/wire" if scheme == "unix" else f"{scheme}:127.0.0.1:{free_port()}"
    wire = Wire(near, address, cut_after=SIZE // 2)
    with sender(short, address, identity) as sent, wire.opened():
        client = reader(near, identity, streams=1)
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
        assert wire.connections == 2
        assert wire.nbytes < SIZE + 2 * bulk._PIECE_BYTES
        client.close()


async def test_a_record_of_tls_that_was_altered_comes_again(short: Path, identity: bytes) -> None:
    address = f"tls:127.0.0.1:{free_port()}"
    wire = Wire(f"tls:127.0.0.1:{free_port()}", address, flip_at=SIZE // 2)
    with sender(short, address, identity) as sent, wire.opened():
        client = reader(wire.address, identity, streams=1)
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
        assert wire.connections == 2
        client.close()


async def test_a_silent_sender_ends_the_read(short: Path) -> None:
    wire = Wire(f"unix:{short}/wire", f"unix:{short}/bulk", hold_after=SIZE // 2)
    with sender(short, f"unix:{short}/bulk") as sent, wire.opened():
        client = reader(wire.address, streams=1, patience_s=0.6, silence_s=60.0)
        message = rf"agent\.0: it sent \d+ of {SIZE} bytes and no more"
        with pytest.raises(WorkerDied, match=message):
            await read(client, sent.what, SIZE)
        client.close()


async def test_who_waits_for_a_silent_sender_is_not_taken_for_hung(short: Path) -> None:
    wire = Wire(f"unix:{short}/wire", f"unix:{short}/bulk", hold_after=0)
    with sender(short, f"unix:{short}/bulk") as sent, wire.opened():
        client = reader(wire.address, patience_s=1.2)
        shown: list[float] = []
        clock = asyncio.get_running_loop().time
        memory = memoryview(bytearray(SIZE))
        with pytest.raises(WorkerDied):
            await client.read("agent.0", sent.what, memory, lambda: shown.append(clock()))
        assert len(shown) >= 3
        client.close()


async def test_a_silent_connection_is_made_anew(short: Path) -> None:
    wire = Wire(f"unix:{short}/wire", f"unix:{short}/bulk", hold_after=2 * PART_BYTES)
    with sender(short, f"unix:{short}/bulk") as sent, wire.opened():
        client = reader(wire.address, streams=1, patience_s=60.0, silence_s=0.3)
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
        assert wire.connections > 1
        client.close()


async def test_a_node_that_is_gone_ends_the_read(short: Path) -> None:
    client = reader(f"unix:{short}/bulk", patience_s=0.5)
    with pytest.raises(WorkerDied, match="it sent 0 of 9 bytes and no more") as caught:
        await read(client, PushedContent("policy.0", 100, 9), 9)
    assert "No such file" in caught.value.why
    client.close()


async def test_a_server_that_comes_late_is_waited_for(short: Path) -> None:
    address = f"unix:{short}/bulk"
    client = reader(address, patience_s=60.0)
    what = PushedContent("policy.0", 100, SIZE)
    early = asyncio.ensure_future(read(client, what, SIZE))
    source = await _source_in_trouble(client)
    with sender(short, address) as sent:
        assert np.array_equal(await early, sent.content)
    assert "No such file" in source.trouble
    client.close()


async def _source_in_trouble(client: BulkClient) -> Any:
    """Returns the client's only source when it has failed once."""
    while not (client._sources and client._sources["agent.0"].trouble):
        await asyncio.sleep(0.01)
    return client._sources["agent.0"]


async def test_nobody_writes_into_the_memory_of_a_read_that_was_cancelled(short: Path) -> None:
    wire = Wire(f"unix:{short}/wire", f"unix:{short}/bulk", hold_after=SIZE // 2)
    with sender(short, f"unix:{short}/bulk") as sent, wire.opened():
        client = reader(wire.address, streams=2)
        memory = np.zeros(SIZE, np.uint8)
        task = asyncio.ensure_future(client.read("agent.0", sent.what, memory.data, lambda: None))
        await asyncio.to_thread(wire.holds.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(thread.part is None for thread in client._sources["agent.0"]._threads)
        came = memory.copy()
        wire.hold_after = None
        wire.go_on.set()
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
        assert np.array_equal(memory, came)
        client.close()


async def test_closing_a_client_ends_its_reads(short: Path) -> None:
    wire = Wire(f"unix:{short}/wire", f"unix:{short}/bulk", hold_after=SIZE // 2)
    with sender(short, f"unix:{short}/bulk") as sent, wire.opened():
        client = reader(wire.address)
        task = asyncio.ensure_future(read(client, sent.what, SIZE))
        await asyncio.to_thread(wire.holds.wait)
        client.close()
        with pytest.raises(WorkerDied, match="this node reads nothing more"):
            await task


async def test_an_address_that_is_taken_is_named(short: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        server = BulkServer(
            "agent.0", f"tcp:127.0.0.1:{port}", SECRET, lambda what: Region(short, 0, 0)
        )
        with pytest.raises(AddressError, match=f"tcp:127.0.0.1:{port}: no content can be served"):
            server.start()
