"""Pushes weights from a trainer to two generators, in processes of their own, over unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import RunSettings
from gcore_core.node import handshake
from gcore_core.node.spawn import spawn_process
from gcore_core.runtime.messages import (
    HELLO,
    PUSH_BEGIN,
    PUSH_PULL,
    TRAIN_RANKS,
    BeginPush,
    Hello,
    Nothing,
    PullWeights,
    PushConfirmed,
    StorePlace,
    TrainRequest,
    WorkerSpec,
)
from gcore_core.runtime.worker_settings import GeneratorSettings, PlainContext, TrainerSettings
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork

S = TypeVar("S", bound="PushSite")


@dataclass
class PushSite:
    """Runs workers ``policy.0``, ``rollout.0`` and ``rollout.1``, and supervises them.

    step: the next step.
    """

    directory: Path
    addresses: dict[str, str]
    network: RpcNetwork
    secret: bytes
    step: int = 0
    # Worker -> where its pid comes when it serves.
    _pids: dict[str, asyncio.Queue[int]] = field(default_factory=dict)
    _started: list[tuple[asyncio.subprocess.Process, int]] = field(default_factory=list)

    async def hello(self, request: Hello, call: Call) -> Nothing:
        self._pids[request.name].put_nowait(request.pid)
        return Nothing()

    async def start(self, name: str, backend: FactorySpec) -> int:
        """Starts a worker and returns its pid when it serves."""
        role, _, rank = name.partition(".")
        run = RunSettings(steps=1, deterministic=True)
        context = PlainContext(directory=str(self.directory))
        settings: TrainerSettings | GeneratorSettings
        if role == "policy":
            settings = TrainerSettings(run=run, context=context)
        else:
            settings = GeneratorSettings(run=run, context=context)
        spec = WorkerSpec(
            role=role,
            rank=int(rank),
            ranks=1,
            peers=self.addresses,
            factories={"backend": backend},
            secret=self.secret,
            settings=settings,
            store=StorePlace(str(self.directory), "node0", "supervisor"),
            versions=handshake.versions([]),
        )
        self._pids[name] = asyncio.Queue()
        paths = os.pathsep.join([*filter(None, sys.path), str(self.directory)])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "gcore_core.node.worker"]
        self._started.append(
            await spawn_process(command, spec, self.directory / f"{name}.log", environment)
        )
        return await self._pids[name].get()

    async def train(self) -> int:
        """Makes one update without records; returns the version that it makes."""
        request = TrainRequest(self.step, [], 1, 1)
        (reply,) = await self.network.peer("policy.0").call(TRAIN_RANKS.of_rank, [request])
        assert reply is not None
        self.step += 1
        return reply.version

    async def begin_push(self, request: BeginPush) -> None:
        await self.network.peer("policy.0").call(PUSH_BEGIN, request)

    def pull(self, number: int, version: int, attempt: int = 0) -> asyncio.Task[PushConfirmed]:
        request = PullWeights(version, number, "policy.0", attempt)
        peer: Any = self.network.peer(f"rollout.{number}")
        return asyncio.ensure_future(peer.call(PUSH_PULL, request))

    async def close(self) -> None:
        await self.network.close()
        for process, lifeline in self._started:
            os.close(lifeline)  # which ends it
            await process.wait()


@contextlib.asynccontextmanager
async def open_push_site(backends: str, kind: type[S]) -> AsyncIterator[S]:
    """Starts the workers of a push site.

    backends: source of a module ``backends`` that the workers can import.
    kind: of the site.
    """
    with tempfile.TemporaryDirectory(
        prefix="gc-", dir="/tmp"
    ) as place:  # socket paths must be short
        directory = Path(place)
        secret = secrets.token_bytes(32)
        (directory / "backends.py").write_text(backends)
        names = ("supervisor", "policy.0", "rollout.0", "rollout.1")
        addresses = {name: f"unix:{directory}/{name}" for name in names}
        site = kind(directory, addresses, RpcNetwork(addresses, secret), secret)
        service = Service("supervisor")
        service.add(HELLO, site.hello)
        await site.network.serve("supervisor", service)
        try:
            yield site
        finally:
            await site.close()
