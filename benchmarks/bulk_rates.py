"""Measures how fast an agent pulls content from another node, against bare blocking sockets.

    python benchmarks/bulk_rates.py [--json] [--rounds 7] [--mib 256] [--streams 2] [--host ADDRESS]
                                    [--at COMMAND]

The sender is a process of its own; ``--at`` is put in front of its command, as in
``--at "ip netns exec node.2"``, and ``--host`` is its address as both sides see it. Each round
moves the same bytes in four ways, one after the other, over TLS 1.3:

bare: one connection, ``sendall`` and ``recv_into`` with warm memory.
read: ``BulkClient.read`` into warm memory.
new: ``SlabService.fetch``, into an empty store. It takes a slab with fresh pages, reads into it as
    before, and compares the xxh3 of the whole with the reference's.
pull: the same, into a store that is full, as a run's is after its first steps: the copy that comes
    takes the memory of the oldest one.

Of each it tells GB/s (the median of the rounds) and the CPU seconds for one GB on both sides.
read_over_bare and so on are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import secrets
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gcore_nodes.bulk import STREAMS, BulkClient, StoredContent
from gcore_nodes.joined_stores import JoinedStores

from gcore_core.contract.records import Ref
from gcore_core.node.agent import process_usage
from gcore_core.store.client import StoreWriter
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire import tls
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call, Service

MEMORY = Path("/dev/shm")
PIECE_BYTES = 1 << 20
# A pull comes after a new one: that one's copy is what it takes the memory of.
WAYS = ("bare", "read", "new", "pull")
CONTENTS = 2  # of one size, for the ways that pull
SENDER = "sender"


class Order(msgspec.Struct):
    """What the sender is told: where it serves, what it has, and the run's secrets."""

    host: str
    nbytes: int
    directory: str
    secret: bytes
    identity: bytes


class Sent(msgspec.Struct):
    """What the sender answers.

    bare_port: where it serves a bare socket.
    port: where it serves content, as an agent does.
    refs: of the contents to be pulled.
    """

    pid: int
    bare_port: int
    port: int
    refs: list[Ref]


# -- the sender ------------------------------------------------------------------------------------


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def serve_bare(order: Order, port: int, file: Path) -> None:
    """Sends the file to everybody who connects."""
    listener = socket.create_server((order.host, port))
    context = tls.contexts(order.identity).server
    descriptor = os.open(file, os.O_RDONLY)
    memory = memoryview(mmap.mmap(descriptor, order.nbytes, prot=mmap.PROT_READ))

    def run() -> None:
        while True:
            accepted, _ = listener.accept()
            sock = context.wrap_socket(accepted, server_side=True)
            for start in range(0, order.nbytes, PIECE_BYTES):
                sock.sendall(memory[start : start + PIECE_BYTES])
            sock.recv(1)  # the reader has all
            sock.close()

    threading.Thread(target=run, daemon=True).start()


async def send() -> None:
    """Is the sending process: reads its order from standard input, and ends with it."""
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    directory = Path(order.directory)
    generator = np.random.default_rng(0)
    contents = [generator.integers(0, 256, order.nbytes, np.uint8) for _ in range(CONTENTS)]
    file = directory / "bare"
    file.write_bytes(contents[0].data)
    bare_port = free_port(order.host)
    serve_bare(order, bare_port, file)
    spec = StoreSpec(
        node=SENDER,
        directory=str(directory / SENDER),
        spill=str(directory / "spill"),
        budget_bytes=2 * CONTENTS * order.nbytes,
    )
    port = free_port(order.host)
    addresses = {SENDER: f"tls:{order.host}:{port}"}
    slabs = SlabService(
        spec,
        order.secret,
        lambda store: JoinedStores(store, addresses, order.secret, order.identity),
    )
    network, service = InlineNetwork(), Service(SENDER)
    slabs.register(service)
    await network.view(SENDER).serve(SENDER, service)
    slabs.remote.open()
    agent = network.view("writer").peer(SENDER)
    writer = StoreWriter(Path(spec.directory), SENDER, order.secret, agent, "writer")
    refs = await writer.put_blobs(0, frozenset({0}), contents)
    sent = Sent(os.getpid(), bare_port, port, refs)
    print(msgspec.json.encode(sent).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


# -- the reader ------------------------------------------------------------------------------------


class Reader:
    """Reads from a sender in each of the ways."""

    def __init__(self, order: Order, sent: Sent, directory: Path, streams: int) -> None:
        self._order = order
        self._sent = sent
        self._context = tls.contexts(order.identity).client
        self._memory = memoryview(mmap.mmap(-1, order.nbytes))
        self._memory[:] = bytes(order.nbytes)
        spec = StoreSpec(
            node="reader",
            directory=str(directory / "reader"),
            spill=str(directory / "spill"),
            budget_bytes=order.nbytes + (1 << 20),
        )
        addresses = {SENDER: f"tls:{order.host}:{sent.port}"}
        self._slabs = SlabService(
            spec,
            order.secret,
            lambda store: JoinedStores(
                store, addresses, order.secret, order.identity, streams=streams
            ),
        )
        self._slabs.register(Service("reader"))
        self._client = BulkClient(addresses, order.secret, order.identity, streams)

    async def read(self, way: str) -> None:
        if way == "bare":
            await asyncio.to_thread(self._read_bare)
            return
        first, second = self._sent.refs
        if way == "read":
            await self._client.read(first.node, StoredContent(first), self._memory, lambda: None)
            return
        if way == "new":
            self._slabs.clear()
        await self._slabs.fetch(first if way == "new" else second, Call(lambda: None))

    def _read_bare(self) -> None:
        connected = socket.create_connection((self._order.host, self._sent.bare_port))
        sock = self._context.wrap_socket(connected)
        got = 0
        while got < self._order.nbytes:
            nbytes = sock.recv_into(self._memory[got : got + PIECE_BYTES])
            if not nbytes:
                raise ConnectionError(f"the sender ended after {got} bytes")
            got += nbytes
        sock.close()

    def close(self) -> None:
        self._client.close()
        self._slabs.close()


async def rounds_of(reader: Reader, sent: Sent, n_rounds: int, nbytes: int) -> dict[str, Any]:
    """Measures all ways in turns; the first round is not counted."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(n_rounds + 1):
        for way in WAYS:
            sender_s, _ = process_usage(sent.pid)
            own_s = time.process_time()
            began_s = time.perf_counter()
            await reader.read(way)
            wall_s = time.perf_counter() - began_s
            if number:
                seconds[way].append(wall_s)
                spent_s = process_usage(sent.pid)[0] - sender_s, time.process_time() - own_s
                cpu[way].append(spent_s)
    gb = nbytes / 1e9
    figures: dict[str, Any] = {}
    for way in WAYS:
        figures[f"{way}_gb_per_s"] = gb / statistics.median(seconds[way])
        figures[f"{way}_sender_cpu_s_per_gb"] = statistics.median(s for s, _ in cpu[way]) / gb
        figures[f"{way}_reader_cpu_s_per_gb"] = statistics.median(r for _, r in cpu[way]) / gb
    for way in WAYS[1:]:
        pairs = zip(seconds["bare"], seconds[way], strict=True)
        figures[f"{way}_over_bare"] = statistics.median(bare / own for bare, own in pairs)
    return figures


def measure(
    identity: bytes,
    host: str = "127.0.0.1",
    at: Sequence[str] = (),
    nbytes: int = 256 << 20,
    n_rounds: int = 7,
    streams: int = STREAMS,
) -> dict[str, float]:
    """Returns rates, CPU seconds and ratios by name, as the head of this file explains them.

    identity: PEM of a key and its certificate.
    host: address of the sender.
    at: words in front of the sender's command, which take it to another node.
    nbytes: size of the content.
    """
    directory = Path(tempfile.mkdtemp(prefix="g-core-bulk-", dir=MEMORY))
    secret = secrets.token_bytes(32)
    order = Order(host, nbytes, str(directory), secret, identity)
    command = [*at, sys.executable, str(Path(__file__).resolve()), "--send"]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sender.stdin is not None and sender.stdout is not None
    try:
        sender.stdin.write(msgspec.json.encode(order) + b"\n")
        sender.stdin.flush()
        sent = msgspec.json.decode(sender.stdout.readline(), type=Sent)

        async def run() -> dict[str, float]:
            reader = Reader(order, sent, directory, streams)
            try:
                return await rounds_of(reader, sent, n_rounds, nbytes)
            finally:
                reader.close()

        return asyncio.run(run())
    finally:
        sender.stdin.close()
        sender.wait(30)
        shutil.rmtree(directory, ignore_errors=True)


def make_identity() -> bytes:
    """Makes a key and a certificate with the openssl program."""
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 7 -subj /CN=run"
    command = ["openssl", *words.split(), "-keyout", "-", "-out", "-"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="size of the content")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--host", default="127.0.0.1", help="address of the sender")
    parser.add_argument("--at", default="", help="command that takes the sender to its node")
    arguments = parser.parse_args()
    if arguments.send:
        asyncio.run(send())
        return
    figures = measure(
        make_identity(),
        arguments.host,
        shlex.split(arguments.at),
        arguments.mib << 20,
        arguments.rounds,
        arguments.streams,
    )
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
