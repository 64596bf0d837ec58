"""Does on the nodes what machines.py measures there; nothing by itself.

    machines_inside.py open      opens and closes a site again and again
    machines_inside.py push      pushes weights from one node to four receivers on another one
    machines_inside.py answer    serves one process over TLS until standard input ends
    machines_inside.py ask       calls the process that answers

An order comes as one line of JSON by standard input, and what was measured goes as one line of JSON
to standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from gcore_nodes.command_launcher import CommandLauncher
from gcore_nodes.config import CommandConfig
from weight_push import BUCKET_BYTES, ModelConfig

from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import RunSettings
from gcore_core.contract.launching import ALIVE, Site
from gcore_core.node import handshake
from gcore_core.runtime.messages import (
    HELLO,
    PUSH_BEGIN,
    PUSH_PULL,
    SPAWN,
    TRAIN_RANKS,
    USAGE,
    BeginPush,
    Hello,
    Nothing,
    PullWeights,
    SpawnRequest,
    StorePlace,
    TrainRequest,
    WorkerSpec,
)
from gcore_core.runtime.worker_settings import GeneratorSettings, PlainContext, TrainerSettings
from gcore_core.wire.retry import insist
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork

PATIENCE_S = 120.0
RECEIVERS = 4


class Order(msgspec.Struct, kw_only=True):
    """What is to be done.

    directory: for logs.
    sockets: directory for sockets; its path is short.
    hosts: addresses of the nodes; the first one is where ``open`` and ``push`` run.
    command: leads to a host, see ``CommandConfig``.
    rounds: how often it is done.
    nbytes: of the model that is pushed.
    calls: of each round.
    address: of the process that answers, "tls:HOST:PORT".
    secret, identity: of the network between the one that asks and the one that answers.
    """

    directory: str
    sockets: str
    rounds: int = 1
    hosts: list[str] = []
    command: str = ""
    nbytes: int = 0
    calls: int = 0
    address: str = ""
    secret: bytes = b""
    identity: bytes = b""


def launcher_of(order: Order) -> CommandLauncher:
    """Returns the launcher of a run on all the order's hosts."""
    return CommandLauncher(
        CommandConfig(hosts=order.hosts, command=order.command, devices=1, socket_dir=order.sockets)
    )


# -- opening a site --------------------------------------------------------------------------------


async def open_sites(order: Order) -> list[float]:
    """Returns the seconds from opening a site until all its agents have answered, per round."""
    took_s = []
    for _ in range(order.rounds):
        launcher = launcher_of(order)
        names = [node.name for node in await launcher.nodes("auto")]
        where = {f"rollout.{index}": name for index, name in enumerate(names)}
        began_s = time.perf_counter()
        async with launcher.site(where, Service("supervisor"), Path(order.directory)) as site:
            answers = (
                node.agent.call(USAGE, Nothing(), deadline_s=PATIENCE_S)
                for node in site.nodes.values()
            )
            await asyncio.gather(*answers)
            took_s.append(time.perf_counter() - began_s)
            if len(site.nodes) != len(order.hosts):
                raise SystemExit(f"{len(site.nodes)} agents answer on {len(order.hosts)} nodes")
    return took_s


# -- a push to another node ------------------------------------------------------------------------


def sent_bytes(order: Order, host: str) -> int:
    """Returns how many bytes the network interface of a node has sent since it exists."""
    words = [*shlex.split(order.command.format(host=host)), "cat", "/proc/net/dev"]
    table = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in table.splitlines() if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[8])


def worker_of(name: str, site: Site, order: Order) -> WorkerSpec:
    """Returns the spec of a trainer or a generator that holds the model."""
    role, _, rank = name.partition(".")
    node = site.where[name]
    is_trainer = role == "policy"
    kind = TrainerSettings if is_trainer else GeneratorSettings
    backend = "TableTrainer" if is_trainer else "FingerprintedGenerator"
    factory = FactorySpec(
        f"weight_push:{backend}", "weight_push:ModelConfig", {"nbytes": order.nbytes}
    )
    return WorkerSpec(
        role=role,
        rank=int(rank),
        ranks=1,
        peers=site.views[node],
        factories={"backend": factory},
        secret=site.secret,
        settings=kind(
            run=RunSettings(steps=1, deterministic=True),
            context=PlainContext(directory=order.directory),
        ),
        store=StorePlace(str(site.nodes[node].store), node, node),
        versions=handshake.versions([]),
        log=str(Path(order.directory) / f"{name}.log"),
        identity=site.identity,
        public=site.public.get(name, ""),
    )


#: Makes the next step and pushes its weights; returns the bytes that the sender's node has sent
#: meanwhile.
PushOnce = Callable[[], Awaitable[int]]


@contextlib.asynccontextmanager
async def pushing(order: Order, nbytes: int) -> AsyncIterator[PushOnce]:
    """Opens a site with the trainer on the second node and all receivers on the third.

    Every receiver hashes what it holds after a push; the benchmark ends where that is not what the
    trainer has.

    nbytes: of the model.
    """
    launcher = launcher_of(order)
    names = [node.name for node in await launcher.nodes("auto")]
    receivers = [f"rollout.{index}" for index in range(RECEIVERS)]
    where = {"policy.0": names[1], **dict.fromkeys(receivers, names[2])}
    supervisor = Service("supervisor")
    up: asyncio.Queue[str] = asyncio.Queue()

    async def hello(request: Hello, call: Call) -> Nothing:
        up.put_nowait(request.name)
        return Nothing()

    supervisor.add(HELLO, hello)
    async with launcher.site(where, supervisor, Path(order.directory)) as site:
        for node in names[1:3]:
            specs = [worker_of(name, site, order) for name in where if where[name] == node]
            await site.nodes[node].agent.call(SPAWN, SpawnRequest(specs))
        async with asyncio.timeout(PATIENCE_S):
            while where.keys() - {await up.get() for _ in where}:
                pass
        policy = site.network.peer("policy.0")
        n_pushed = 0

        async def push_once() -> int:
            nonlocal n_pushed
            step = n_pushed
            n_pushed += 1
            (reply,) = await policy.call(TRAIN_RANKS.of_rank, [TrainRequest(step, [], 1, 1)])
            assert reply is not None
            before = await asyncio.to_thread(sent_bytes, order, order.hosts[1])
            begun = BeginPush(reply.version, BUCKET_BYTES, RECEIVERS)
            await policy.call(PUSH_BEGIN, begun)
            pulls = (
                site.network.peer(name).call(
                    PUSH_PULL,
                    PullWeights(reply.version, index, "policy.0", release_before=step + 1),
                )
                for index, name in enumerate(receivers)
            )
            for confirmed in await asyncio.gather(*pulls):
                if not confirmed.verified or confirmed.nbytes != nbytes:
                    raise SystemExit(f"a receiver has not the trainer's weights: {confirmed}")
            return await asyncio.to_thread(sent_bytes, order, order.hosts[1]) - before

        yield push_once


async def push(order: Order) -> list[list[int]]:
    """Returns (bytes that the sender's node sent, bytes of the model) of each push."""
    nbytes = sum(spec.nbytes for spec in ModelConfig(nbytes=order.nbytes).specs())
    async with pushing(order, nbytes) as push_once:
        return [[await push_once(), nbytes] for _ in range(order.rounds)]


# -- small calls -----------------------------------------------------------------------------------


async def answer(order: Order) -> None:
    """Serves a process that only says that it is alive."""
    network = RpcNetwork({"answerer": order.address}, order.secret, identity=order.identity)
    await network.serve("answerer", Service("answerer"))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await network.close()


async def ask(order: Order) -> list[list[float]]:
    """Returns the milliseconds of every call, one after the other, by rounds."""
    network = RpcNetwork({"answerer": order.address}, order.secret, identity=order.identity)
    peer = network.peer("answerer")
    await insist(peer, ALIVE, None)
    rounds = []
    for _ in range(order.rounds):
        took_ms = []
        for _ in range(order.calls):
            began_s = time.perf_counter()
            await peer.call(ALIVE, None)
            took_ms.append(1000 * (time.perf_counter() - began_s))
        rounds.append([statistics.median(took_ms), max(took_ms)])
    await network.close()
    return rounds


def main(words: Sequence[str]) -> None:
    does: dict[str, Any] = {
        "open": open_sites,
        "push": push,
        "answer": answer,
        "ask": ask,
    }
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    found = asyncio.run(does[words[0]](order))
    if found is not None:
        print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
