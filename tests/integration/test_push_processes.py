"""Pushes between worker processes of their own, over unix sockets, one of which is killed in the middle."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gcore_core.errors import ContractError, WorkerDied
from gcore_core.factories import FactorySpec
from gcore_core.processes import handshake
from gcore_core.processes.messages import (
    Hello,
    Nothing,
    OpenPush,
    PullWeights,
    PushConfirmed,
    TrainReply,
    TrainRequest,
    WorkerSpec,
)
from gcore_core.processes.rpc import RpcNetwork
from gcore_core.processes.service import Call, Service
from gcore_core.processes.spawning import spawn_process

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 60.0

BACKENDS = '''
"""A trainer whose weights are not those that generators begin with; a generator that stops in its first push."""
import os
from pathlib import Path

import numpy as np

from gcore_core.testing import fake


class Trainer(fake.FakeTrainer):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._logits = np.arange(len(fake.VOCABULARY), dtype=np.float32)


class Generator(fake.FakeGenerator):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._pipes = Path(context.directory)

    def load_weights(self, tensors):
        super().load_weights(tensors)
        if (self._pipes / "halted").exists():
            (self._pipes / "halted").write_text("in the middle")  # somebody reads it
            (self._pipes / "never").read_text()  # nobody writes it
'''


@dataclass
class Site:
    """Workers by name, and this process as their supervisor."""

    directory: Path
    addresses: dict[str, str]
    network: RpcNetwork
    secret: bytes
    pids: dict[str, asyncio.Queue[int]] = field(default_factory=dict)
    started: list[tuple[asyncio.subprocess.Process, int]] = field(default_factory=list)

    async def hello(self, request: Hello, call: Call) -> Nothing:
        self.pids[request.name].put_nowait(request.pid)
        return Nothing()

    async def start(self, name: str, backend: str) -> int:
        """Starts a worker and returns its pid when it serves."""
        role, _, rank = name.partition(".")
        kind = "trainer" if role == "policy" else "generator"
        context = {"devices": [], "seed": 0, "deterministic": False, "steps": 1, "updates_per_step": 1, "model": {}}
        spec = WorkerSpec(
            kind=kind,
            role=role,
            rank=int(rank),
            ranks=1,
            peers=self.addresses,
            factories={
                "backend": FactorySpec(backend, f"gcore_core.testing.fake:Fake{kind.capitalize()}Config"),
            },
            secret=self.secret,
            settings={
                "shards": 1,
                "rank": 0,
                "seed": 0,
                "deterministic": True,
                "store": str(self.directory),
                "node": "node0",
                "agent": "supervisor",
                "context": {**context, "rendezvous": "", "engine": {}, "directory": str(self.directory)},
            },
            versions=handshake.versions([]),
        )
        self.pids[name] = asyncio.Queue()
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{self.directory}"}
        command = [sys.executable, "-m", "gcore_core.processes.worker"]
        self.started.append(await spawn_process(command, spec, self.directory / f"{name}.log", environment))
        return await self.pids[name].get()

    async def open(self, attempt: int) -> None:
        request = OpenPush(1, 1, 2, attempt)  # a bucket holds one of the two tensors
        await self.network.peer("policy.0").call("open_push", request, Nothing)

    def pull(self, number: int, attempt: int) -> asyncio.Task[PushConfirmed]:
        request = PullWeights(1, number, "policy.0", attempt)
        peer: Any = self.network.peer(f"rollout.{number}")
        return asyncio.ensure_future(peer.call("pull", request, PushConfirmed))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as place:  # socket paths must be short
        directory, secret = Path(place), secrets.token_bytes(32)
        (directory / "backends.py").write_text(BACKENDS)
        names = ("supervisor", "policy.0", "rollout.0", "rollout.1")
        addresses = {name: f"unix:{directory}/{name}" for name in names}
        site = Site(directory, addresses, RpcNetwork(addresses, secret), secret)
        service = Service("supervisor")
        service.add("hello", Hello, site.hello)
        await site.network.serve("supervisor", service)
        try:
            yield site
        finally:
            await site.network.close()
            for process, lifeline in site.started:
                os.close(lifeline)  # which ends it
                await process.wait()


async def test_a_generator_killed_in_a_push_leaves_the_trainer_able_to_push(site: Site) -> None:
    """The survivor is freed by the next attempt; the killed one's replacement and it hold the trainer's bytes."""
    async with asyncio.timeout(PATIENCE_S):
        halted = asyncio.Event()
        for pipe in ("halted", "never"):
            os.mkfifo(site.directory / pipe)
        told = os.open(site.directory / "halted", os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(told, halted.set)
        _, _, dying = await asyncio.gather(
            site.start("policy.0", "backends:Trainer"),
            site.start("rollout.0", "gcore_core.testing.fake:FakeGenerator"),
            site.start("rollout.1", "backends:Generator"),
        )
        policy = site.network.peer("policy.0")
        (trained,) = await policy.call("train", [TrainRequest(0, [], 1, 1)], list[TrainReply])
        assert trained.version == 1
        await site.open(attempt=0)
        surviving, killed = site.pull(0, attempt=0), site.pull(1, attempt=0)
        await halted.wait()
        asyncio.get_running_loop().remove_reader(told)
        os.close(told)
        (site.directory / "halted").unlink()
        os.kill(dying, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await killed
        assert not surviving.done()
        await site.start("rollout.1", "backends:Generator")
        await site.open(attempt=1)
        with pytest.raises(ContractError, match="another push began before this one ended"):
            await surviving
        confirmed = await asyncio.gather(*(site.pull(number, attempt=1) for number in range(2)))
    assert [(push.version, push.nbytes, push.verified) for push in confirmed] == [(1, 36, True)] * 2
