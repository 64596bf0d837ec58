"""Does on two nodes what the part ``object_store`` of machines.py measures; nothing by itself.

    machines_ray_inside.py ours     opens a site on both nodes and sends payload by the agents
    machines_ray_inside.py ray      joins a Ray cluster and sends payload by its object store
    machines_ray_inside.py reader   reads on the other node, for ``ours``

All are started with an order as one line of JSON on standard input. The first two write "pause"
before and after the steps that are measured, and wait for a line; then they write the seconds of
each step as one line of JSON. Payload is the same in both: parts of arrays of three dtypes. The
reader opens every array, hashes it, and answers with the hashes, which the writer compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

PATIENCE_S = 300.0
READER = "policy.0"
WRITER = "rollout.0"
SHARDS = frozenset({0})

Arrays = Mapping[str, np.ndarray]


class Order(msgspec.Struct, kw_only=True):
    """What is to be done.

    hosts: addresses of the two nodes; this is the first.
    command: leads to a host, see ``CommandConfig``.
    python: the interpreter of what is started on the other node.
    directory: for logs.
    sockets: directory for sockets; its path is short.
    private: networks on which content goes in plain.
    cluster: HOST:PORT of the Ray cluster.
    nbytes: of the payload of a step.
    parts: in which it is sent.
    steps: how many are measured; one before them only warms.
    """

    hosts: list[str]
    command: str
    python: str
    directory: str
    sockets: str
    private: list[str] = []
    cluster: str = ""
    nbytes: int
    parts: int
    steps: int


class ReaderOrder(msgspec.Struct, kw_only=True):
    """What the reader of ``ours`` is told: the arguments of its network and of its store."""

    peers: dict[str, str]
    public: str
    secret: bytes
    identity: bytes
    directory: str
    node: str


def payload_of(order: Order) -> list[dict[str, np.ndarray]]:
    """Returns the parts of a step: a third each of int32, float32 and uint8."""
    random = np.random.default_rng(0)
    n_words = order.nbytes // order.parts // 12
    return [
        {
            "tokens": random.integers(0, 1 << 30, n_words, np.int32),
            "values": random.random(n_words, np.float32),
            "pixels": random.integers(0, 256, 4 * n_words, np.uint8),
        }
        for _ in range(order.parts)
    ]


def hashes_of(arrays: Arrays) -> list[int]:
    """Reads every byte: returns the xxh3-64 of each array, by name."""
    return [xxhash.xxh3_64_intdigest(arrays[name].data) for name in sorted(arrays)]


class Watch:
    """Measures steps, and ends the benchmark where a reader has other bytes than the writer.

    steps: how many are measured; one before them only warms.
    """

    def __init__(self, parts: Sequence[Arrays], steps: int) -> None:
        self._expected = [hashes_of(part) for part in parts]
        self._steps = steps
        self._began_s = 0.0
        self.took_s: list[float] = []

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def end(self, hashes: list[list[int]]) -> None:
        self.took_s.append(time.perf_counter() - self._began_s)
        if hashes != self._expected:
            raise SystemExit("the reader has other bytes than the writer")
        if len(self.took_s) in (1, 1 + self._steps):
            # machines_ray.py looks at what all processes have used, while nothing moves.
            print("pause", flush=True)
            sys.stdin.readline()


# -- by agents -------------------------------------------------------------------------------------


async def by_agents(order: Order) -> list[float]:
    """Returns the seconds of each step: written here, pulled, opened and hashed on the other node.

    Each part is told to the reader as soon as it is written.
    """
    from gcore_nodes.command_launcher import CommandLauncher
    from gcore_nodes.config import CommandConfig

    from gcore_core.runtime.rpc.service import Service
    from gcore_core.runtime.store.client import StoreWriter

    parts = payload_of(order)
    watch = Watch(parts, order.steps)
    launcher = CommandLauncher(
        CommandConfig(
            hosts=order.hosts,
            command=order.command,
            python=order.python,
            devices=1,
            private=order.private,
            socket_dir=order.sockets,
            store_gib=1.25 * order.nbytes / 2**30 + 0.05,
        )
    )
    names = [node.name for node in await launcher.nodes("auto")]
    where = {WRITER: names[0], READER: names[1]}
    async with launcher.site(where, Service("supervisor"), Path(order.directory)) as site:
        home = site.home_node
        writer = StoreWriter(home.store, site.home, site.secret, home.agent, WRITER)
        told = ReaderOrder(
            peers=site.views[names[1]],
            public=site.public[READER],
            secret=site.secret,
            identity=site.identity,
            directory=str(site.nodes[names[1]].store),
            node=names[1],
        )
        with reader_on(order, told):
            reader = site.network.peer(READER)

            async def send(step: int, part: Arrays) -> asyncio.Future[list[int]]:
                ref = await writer.put(step, SHARDS, [part])
                call = reader.call(_read_endpoint(), ref, deadline_s=PATIENCE_S)
                return asyncio.ensure_future(call)

            for step in range(1, order.steps + 2):
                writer.release({0: (0, step)})
                watch.begin()
                answers = [await send(step, part) for part in parts]
                watch.end(await asyncio.gather(*answers))
    return watch.took_s[1:]


def _read_endpoint() -> Any:
    from gcore_core.contract.launching import Endpoint
    from gcore_core.contract.records import Ref

    return Endpoint("read", Ref, list[int])


@contextlib.contextmanager
def reader_on(order: Order, told: ReaderOrder) -> Any:
    """Starts the reader on the other node, and ends it."""
    words = [*shlex.split(order.command.format(host=order.hosts[1])), order.python, __file__]
    with subprocess.Popen(
        [*words, "reader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(told) + b"\n")
        process.stdin.flush()
        if process.stdout.readline() != b"ready\n":
            raise SystemExit("the reader did not start; see what it wrote above")
        try:
            yield
        finally:
            process.stdin.close()


async def read_by_agents(told: ReaderOrder) -> None:
    """Serves the reader until its standard input ends."""
    from gcore_core.contract.records import Ref
    from gcore_core.runtime.rpc.service import Call, Service
    from gcore_core.runtime.rpc.sockets import RpcNetwork
    from gcore_core.runtime.store.client import StoreReader

    network = RpcNetwork(
        told.peers, told.secret, identity=told.identity, public={READER: told.public}
    )
    agent = network.peer(told.node)
    reader = StoreReader(Path(told.directory), told.node, told.secret, agent)

    async def read(ref: Ref, call: Call) -> list[int]:
        (chunk,) = await reader.arrays([ref])
        return await asyncio.to_thread(hashes_of, chunk[0])

    service = Service(READER)
    service.add(_read_endpoint(), read)
    await network.serve(READER, service)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await network.close()


# -- by Ray's object store -------------------------------------------------------------------------


def by_ray(order: Order) -> list[float]:
    """Returns the seconds of each step: put here, got, opened and hashed on the other node.

    Each part is told to the reader as soon as it is put, and the reader gets several at once.
    Arrays are zero-copy views of the object store, as Ray has it by default.
    """
    import ray

    parts = payload_of(order)
    watch = Watch(parts, order.steps)
    ray.init(order.cluster, log_to_driver=False, logging_level="ERROR")

    class Reader:
        def read(self, references: list[Any]) -> list[int]:
            # A list, or Ray would get the object before the call.
            return hashes_of(ray.get(references[0]))

    pinned = {f"node:{order.hosts[1]}": 0.001}
    reader = (
        ray.remote(Reader)
        .options(num_cpus=0, resources=pinned, max_concurrency=len(parts))
        .remote()
    )
    for _ in range(order.steps + 1):
        watch.begin()
        answers = [reader.read.remote([ray.put(part)]) for part in parts]
        watch.end(ray.get(answers))
        del answers
    ray.shutdown()
    return watch.took_s[1:]


def main() -> None:
    what, line = sys.argv[1], sys.stdin.readline()
    if what == "reader":
        asyncio.run(read_by_agents(msgspec.json.decode(line, type=ReaderOrder)))
        return
    order = msgspec.json.decode(line, type=Order)
    took_s = asyncio.run(by_agents(order)) if what == "ours" else by_ray(order)
    print(msgspec.json.encode(took_s).decode(), flush=True)


if __name__ == "__main__":
    main()
