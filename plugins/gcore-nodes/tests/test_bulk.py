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
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_nodes import bulk
from gcore_nodes.bulk import (
    PART_BYTES,
    BulkClient,
    BulkServer,
    PushedContent,
    Region,
    What,
)

from gcore_core.contract.errors import (
    AddressError,
    ContractError,
    DataError,
    WorkerDied,
)
from gcore_core.kits.wire import contexts
from tests.support.wires import Wire, free_address, make_identity, shared_identity

SECRET = b"s" * 32
SIZE = 3 * PART_BYTES + 12_345


@pytest.fixture
def address() -> str:
    return free_address()


@dataclass
class Sender:
    """A server of one file, whose content begins at byte 100."""

    server: BulkServer
    content: np.ndarray

    @property
    def what(self) -> What:
        return PushedContent("policy.0", 100, self.content.nbytes)


@contextlib.contextmanager
def sender(directory: Path, address: str, size: int = SIZE) -> Iterator[Sender]:
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path = directory / "content"
    path.write_bytes(secrets.token_bytes(100) + content.tobytes())

    def find(what: What) -> Region:
        assert isinstance(what, PushedContent)
        if what.worker != "policy.0":
            raise DataError(f"no worker {what.worker!r} pushes here")
        return Region(path, what.offset, what.nbytes)

    server = BulkServer("agent.0", address, SECRET, find, shared_identity())
    server.start()
    try:
        yield Sender(server, content)
    finally:
        server.close()


def reader(
    address: str, *, identity: bytes | None = None, secret: bytes = SECRET, **limits: Any
) -> BulkClient:
    identity = shared_identity() if identity is None else identity
    return BulkClient({"agent.0": address}, secret, identity, **limits)


async def read(client: BulkClient, what: What, nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes, np.uint8)
    await client.read("agent.0", what, memory.data, lambda: None)
    return memory


@pytest.mark.parametrize("size", [0, 1, bulk._PIECE_BYTES, PART_BYTES, PART_BYTES + 1, SIZE])
@pytest.mark.parametrize("streams", [1, 3])
async def test_every_byte_arrives(size: int, streams: int, address: str, tmp_path: Path) -> None:
    client = reader(address, streams=streams)
    with sender(tmp_path, address, size) as sent:
        for _ in range(2):  # the second time over the same connections
            assert np.array_equal(await read(client, sent.what, size), sent.content)
        assert sent.server.sent_bytes == 2 * size
    client.close()


@pytest.mark.parametrize("can_map", [True, False])
async def test_every_byte_arrives_in_memory_that_is_not_mapped_yet(
    can_map: bool, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_map:  # as on other systems than Linux
        monkeypatch.setattr(bulk, "_madvise", None)
    client = reader(address)
    with sender(tmp_path, address) as sent:
        memory = memoryview(mmap.mmap(-1, SIZE + 8))[8:]
        await client.read("agent.0", sent.what, memory, lambda: None, is_unmapped=True)
        assert np.array_equal(np.frombuffer(memory, np.uint8), sent.content)
    client.close()


async def test_many_reads_at_once_share_the_connections(address: str, tmp_path: Path) -> None:
    wire = Wire(free_address(), address)
    with sender(tmp_path, address, size=1000) as sent, wire.opened():
        client = reader(wire.address, streams=2)
        found = await asyncio.gather(*(read(client, sent.what, 1000) for _ in range(50)))
        assert all(np.array_equal(one, sent.content) for one in found)
        assert wire.connections == 2
        client.close()


async def test_the_event_loop_has_no_work_for_a_piece(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    with sender(tmp_path, address) as sent:
        client = reader(address)
        await read(client, sent.what, SIZE)
        assert len(woken) == 1
        client.close()


# -- who may read ----------------------------------------------------------------------------------


async def test_a_wrong_secret_gets_nothing(address: str, tmp_path: Path) -> None:
    client = reader(address, secret=b"t" * 32)
    with sender(tmp_path, address) as sent:
        with pytest.raises(ContractError, match="agent.0: refused the connection") as caught:
            await read(client, sent.what, SIZE)
        assert caught.value.why == "wrong or missing run secret"
        assert sent.server.sent_bytes == 0
    client.close()


async def test_a_server_without_the_runs_certificate_is_not_told_the_secret() -> None:
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    stranger = contexts(make_identity()).server
    stranger.verify_mode = ssl.CERT_NONE  # it lets everybody in

    def listen() -> None:
        sock, _ = listener.accept()
        with contextlib.suppress(OSError):
            secured = stranger.wrap_socket(sock, server_side=True)
            while data := secured.recv(1000):
                heard.append(data)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    client = reader(f"tls:127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(ContractError, match="refused the connection") as caught:
        await read(client, PushedContent("policy.0", 0, 9), 9)
    assert "TLS" in caught.value.why
    client.close()
    thread.join(10)
    assert heard == []
    listener.close()


async def test_without_the_runs_certificate_nothing_is_answered(
    address: str, tmp_path: Path
) -> None:
    with sender(tmp_path, address) as sent:
        client = reader(address, identity=make_identity())
        with pytest.raises(ContractError, match="refused the connection") as caught:
            await read(client, sent.what, SIZE)
        assert "TLS" in caught.value.why
        client.close()
        with pytest.raises(AddressError, match="TLS needs the run's identity"):
            await read(reader(address, identity=b""), sent.what, SIZE)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.verify_mode = ssl.CERT_NONE
        with socket.create_connection(bulk._place(address)[1], 10) as plain:
            plain.sendall(bytes(48))
            assert _answer(plain) == b""
        with socket.create_connection(bulk._place(address)[1], 10) as plain:
            assert _answer(bare.wrap_socket(plain)) == b""
        assert sent.server.sent_bytes == 0


def _answer(sock: socket.socket) -> bytes:
    """What a server says; a TLS alert in plain is no content."""
    try:
        data = sock.recv(100)
    except OSError:
        return b""
    return b"" if data[:1] == b"\x15" else data


async def test_tls_of_older_versions_is_refused(address: str, tmp_path: Path) -> None:
    with sender(tmp_path, address):
        context = contexts(shared_identity()).client
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
    what: What, message: str, address: str, tmp_path: Path
) -> None:
    client = reader(address)
    with sender(tmp_path, address) as sent:
        with pytest.raises(DataError, match=message):
            await read(client, what, 9)
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
    client.close()


async def test_an_unknown_node_is_refused() -> None:
    with pytest.raises(ContractError, match="node agent.9: no address is known"):
        await reader(free_address()).read("agent.9", PushedContent("", 0, 0), memoryview(b""), int)


# -- what happens on the way -----------------------------------------------------------------------


async def test_content_altered_before_it_was_sent_is_as_it_lies_there(
    address: str, tmp_path: Path
) -> None:
    """What a sender sends is protected on its way; what it has is its reader's to digest."""
    with sender(tmp_path, address) as sent:
        client = reader(address)
        with open(tmp_path / "content", "r+b") as file:
            file.seek(100)
            file.write(bytes([sent.content[0] ^ 1]))
        found = await read(client, sent.what, SIZE)
        assert np.flatnonzero(found != sent.content).tolist() == [0]
        client.close()


async def test_a_read_goes_on_where_its_connection_broke(address: str, tmp_path: Path) -> None:
    wire = Wire(free_address(), address, cut_after=SIZE // 2)
    with sender(tmp_path, address) as sent, wire.opened():
        client = reader(wire.address, streams=1)
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
        assert wire.connections == 2
        assert wire.nbytes < SIZE + 2 * bulk._PIECE_BYTES
        client.close()


async def test_a_record_of_tls_that_was_altered_comes_again(address: str, tmp_path: Path) -> None:
    wire = Wire(free_address(), address, flip_at=SIZE // 2)
    with sender(tmp_path, address) as sent, wire.opened():
        client = reader(wire.address, streams=1)
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
        assert wire.connections == 2
        client.close()


async def test_a_silent_sender_ends_the_read(address: str, tmp_path: Path) -> None:
    wire = Wire(free_address(), address, hold_after=SIZE // 2)
    with sender(tmp_path, address) as sent, wire.opened():
        client = reader(wire.address, streams=1, patience_s=0.6, silence_s=60.0)
        message = rf"agent\.0: it sent \d+ of {SIZE} bytes and no more"
        with pytest.raises(WorkerDied, match=message):
            await read(client, sent.what, SIZE)
        client.close()


async def test_who_waits_for_a_silent_sender_is_not_taken_for_hung(
    address: str, tmp_path: Path
) -> None:
    wire = Wire(free_address(), address, hold_after=0)
    with sender(tmp_path, address) as sent, wire.opened():
        client = reader(wire.address, patience_s=1.2)
        shown: list[float] = []
        clock = asyncio.get_running_loop().time
        memory = memoryview(bytearray(SIZE))
        with pytest.raises(WorkerDied):
            await client.read("agent.0", sent.what, memory, lambda: shown.append(clock()))
        assert len(shown) >= 3
        client.close()


async def test_a_silent_connection_is_made_anew(address: str, tmp_path: Path) -> None:
    wire = Wire(free_address(), address, hold_after=2 * PART_BYTES)
    with sender(tmp_path, address) as sent, wire.opened():
        client = reader(wire.address, streams=1, patience_s=60.0, silence_s=0.3)
        assert np.array_equal(await read(client, sent.what, SIZE), sent.content)
        assert wire.connections > 1
        client.close()


async def test_a_node_that_is_gone_ends_the_read(address: str, tmp_path: Path) -> None:
    client = reader(address, patience_s=0.5)
    with pytest.raises(WorkerDied, match="it sent 0 of 9 bytes and no more") as caught:
        await read(client, PushedContent("policy.0", 100, 9), 9)
    assert "Connection refused" in caught.value.why
    client.close()


async def test_a_server_that_comes_late_is_waited_for(address: str, tmp_path: Path) -> None:
    client = reader(address, patience_s=60.0)
    what = PushedContent("policy.0", 100, SIZE)
    early = asyncio.ensure_future(read(client, what, SIZE))
    source = await _source_in_trouble(client)
    with sender(tmp_path, address) as sent:
        assert np.array_equal(await early, sent.content)
    assert "Connection refused" in source.trouble
    client.close()


async def _source_in_trouble(client: BulkClient) -> Any:
    """Returns the client's only source when it has failed once."""
    while not (client._sources and client._sources["agent.0"].trouble):
        await asyncio.sleep(0.01)
    return client._sources["agent.0"]


async def test_nobody_writes_into_the_memory_of_a_read_that_was_cancelled(
    address: str, tmp_path: Path
) -> None:
    wire = Wire(free_address(), address, hold_after=SIZE // 2)
    with sender(tmp_path, address) as sent, wire.opened():
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


async def test_closing_a_client_ends_its_reads(address: str, tmp_path: Path) -> None:
    wire = Wire(free_address(), address, hold_after=SIZE // 2)
    with sender(tmp_path, address) as sent, wire.opened():
        client = reader(wire.address)
        task = asyncio.ensure_future(read(client, sent.what, SIZE))
        await asyncio.to_thread(wire.holds.wait)
        client.close()
        with pytest.raises(WorkerDied, match="this node reads nothing more"):
            await task


async def test_an_address_that_is_taken_is_named(address: str, tmp_path: Path) -> None:
    with socket.create_server(bulk._place(address)[1]):
        server = BulkServer(
            "agent.0", address, SECRET, lambda what: Region(tmp_path, 0, 0), shared_identity()
        )
        with pytest.raises(AddressError, match=f"{address}: no content can be served"):
            server.start()


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:29401", "unix:/tmp/bulk"])
async def test_content_goes_over_tls_and_nothing_else(address: str, tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="it is no address of a bulk server"):
        with sender(tmp_path, address):
            pass
    client = reader(address)
    with pytest.raises(AddressError, match="it is no address of a bulk server"):
        await read(client, PushedContent("policy.0", 100, 9), 9)
    client.close()
