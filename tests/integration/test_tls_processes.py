"""A node agent and its worker, as processes, that another machine reaches over TLS."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gcore_nodes.agent import MachineAgentSpec
from gcore_nodes.identity import make_identity

from gcore_core.contract.errors import ContractError, WorkerDied
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import RunSettings
from gcore_core.contract.launching import ALIVE
from gcore_core.node import handshake
from gcore_core.node.spawn import spawn_process
from gcore_core.runtime.messages import (
    HELLO,
    SPAWN,
    Hello,
    Nothing,
    SpawnRequest,
    StorePlace,
    WorkerSpec,
)
from gcore_core.runtime.worker_settings import GeneratorSettings, PlainContext
from gcore_core.store.server import StoreSpec
from gcore_core.wire.retry import insist
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork

WORKER = "rollout.0"
AGENT = "agent.0"
PATIENCE_S = 60.0


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody has, all different."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@dataclass
class Node:
    """A node with one agent and one worker, and the machine from which it is reached."""

    directory: Path
    secret: bytes
    identity: bytes
    inside: dict[str, str]
    public: dict[str, str]
    network: RpcNetwork
    agent_pid: int = 0
    pids: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    async def hello(self, request: Hello, call: Call) -> Nothing:
        self.pids.put_nowait(request.pid)
        return Nothing()

    def worker(self) -> WorkerSpec:
        fake = "gcore_testing.fake"
        return WorkerSpec(
            role="rollout",
            rank=0,
            ranks=1,
            peers=self.inside,
            factories={
                "backend": FactorySpec(f"{fake}:FakeGenerator", f"{fake}:FakeGeneratorConfig")
            },
            secret=self.secret,
            settings=GeneratorSettings(
                run=RunSettings(steps=1, deterministic=True),
                context=PlainContext(directory=str(self.directory)),
            ),
            store=StorePlace(str(self.directory / "store"), AGENT, AGENT),
            versions=handshake.versions([]),
            log=str(self.directory / f"{WORKER}.log"),
            restarts=2,
            identity=self.identity,
            public=self.public[WORKER],
        )


@contextlib.asynccontextmanager
async def node() -> AsyncIterator[Node]:
    """Starts the agent by a spec, and the worker by the agent: from another machine both."""
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as place:
        directory = Path(place)
        secret, identity = secrets.token_bytes(32), make_identity()
        names = ["supervisor", AGENT, WORKER]
        ports = free_ports(len(names))
        inside = {name: f"unix:{directory / name}" for name in names}
        public = {name: f"tls:127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
        # The supervisor is on another machine: the node's processes reach it over TLS, and it them.
        inside["supervisor"] = public["supervisor"]
        network = RpcNetwork(public, secret, identity=identity)
        made = Node(directory, secret, identity, inside, public, network)
        service = Service("supervisor")
        service.add(HELLO, made.hello)
        spec = MachineAgentSpec(
            name=AGENT,
            addresses=inside,
            secret=secret,
            store=StoreSpec(
                node=AGENT, directory=str(directory / "store"), spill=str(directory / "spill")
            ),
            meeting=str(directory / "meeting"),
            identity=identity,
            public=public[AGENT],
        )
        command = [sys.executable, "-m", "gcore_nodes.agent"]
        process, lifeline = await spawn_process(command, spec, directory / f"{AGENT}.log")
        made.agent_pid = process.pid
        try:
            await network.serve("supervisor", service)
            yield made
        finally:
            await network.close()
            os.close(lifeline)
            await process.wait()


async def alive(network: RpcNetwork, name: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await insist(network.peer(name), ALIVE, None)


def told_to(pid: int) -> bytes:
    """What everybody on the machine, or a dump of the environment, can read of a process."""
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def forms(node: Node) -> list[bytes]:
    """How a secret could be written, and each line of the key."""
    key = node.identity[: node.identity.index(b"-----END PRIVATE")].splitlines()[1:]
    secret = node.secret
    written = [secret, secret.hex().encode(), base64.b64encode(secret)[:-1], repr(secret).encode()]
    return [*written, *key]


def shown(node: Node, *pids: int) -> list[str]:
    """Where the secret or the key can be read: processes, and files of the node's directory."""
    places = {f"process {pid}": told_to(pid) for pid in pids}
    for path in node.directory.rglob("*"):
        if path.is_file():
            places[path.name] = path.read_bytes()
    return [name for name, text in places.items() if any(form in text for form in forms(node))]


def listening(pid: int) -> set[str]:
    """The process's listening sockets of the internet families, as the kernel lists them."""
    mine = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.add(words[1])
    return found


def as_the_kernel_writes(address: str) -> str:
    host, _, port = address.removeprefix("tls:").rpartition(":")
    return f"{socket.inet_aton(host)[::-1].hex().upper()}:{int(port):04X}"


def modules_of(pid: int) -> str:
    """The files that a process has mapped, shared libraries among them."""
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.protects
async def test_a_node_is_driven_over_tls_and_neither_secret_nor_key_is_shown() -> None:
    async with node() as made:
        agent = made.network.peer(AGENT)
        await alive(made.network, AGENT)
        await agent.call(SPAWN, SpawnRequest([made.worker()]))
        async with asyncio.timeout(PATIENCE_S):
            pid = await made.pids.get()
        await alive(made.network, WORKER)

        assert pid != made.agent_pid
        assert shown(made, made.agent_pid, pid) == []
        for name, process in ((AGENT, made.agent_pid), (WORKER, pid)):
            assert told_to(process)
            assert listening(process) == {as_the_kernel_writes(made.public[name])}
            assert "cryptography" not in modules_of(process)
        assert "cryptography" in modules_of(os.getpid())  # so it would be seen

        # Its neighbours on the node reach the worker by its socket.
        near = RpcNetwork(made.inside, made.secret)
        await alive(near, WORKER)
        await near.close()


async def test_a_worker_that_is_started_in_place_of_a_lost_one_serves_over_tls_too() -> None:
    async with node() as made:
        agent = made.network.peer(AGENT)
        await alive(made.network, AGENT)
        await agent.call(SPAWN, SpawnRequest([made.worker()]))
        async with asyncio.timeout(PATIENCE_S):
            first = await made.pids.get()
        await alive(made.network, WORKER)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            second = await made.pids.get()
        assert second != first
        await alive(made.network, WORKER)
        assert shown(made, made.agent_pid, second) == []
        assert "cryptography" not in modules_of(second)


async def test_the_search_finds_a_secret_and_a_key_that_were_written() -> None:
    async with node() as made:
        await alive(made.network, AGENT)
        (made.directory / "secret").write_text(f"{made.secret!r}")
        (made.directory / "key").write_bytes(made.identity)
        assert sorted(shown(made, made.agent_pid)) == ["key", "secret"]


@pytest.mark.protects
async def test_a_stranger_learns_nothing_from_a_node_s_agent() -> None:
    """One with a certificate of its own, one who speaks plain text; both know the secret."""
    async with node() as made:
        await alive(made.network, AGENT)
        guest = RpcNetwork(made.public, made.secret, 2.0, identity=make_identity())
        with pytest.raises(ContractError, match="its certificate is not the run's"):
            await guest.peer(AGENT).call(ALIVE, None)
        await guest.close()
        plain = RpcNetwork({AGENT: made.public[AGENT].replace("tls", "tcp")}, made.secret, 2.0)
        with pytest.raises(WorkerDied, match="nobody answers"):
            await plain.peer(AGENT).call(ALIVE, None)
        await plain.close()
        await alive(made.network, AGENT)
        assert (made.directory / f"{AGENT}.log").read_text() == ""
