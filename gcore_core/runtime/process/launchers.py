"""Starts a run's processes: ``core/local`` on this machine, ``core/inline`` in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path

from gcore_core.contract.errors import AddressError, ConfigError, WorkerError
from gcore_core.contract.launching import Servable, Site
from gcore_core.runtime.messages import (
    EXITS,
    METER,
    SPAWN,
    UP,
    USAGE,
    MeterReply,
    MeterRequest,
    Nothing,
    SpawnRequest,
    UsageReply,
    WorkerExit,
    WorkerSpec,
)
from gcore_core.runtime.process.agent import AgentSpec, end_hung, process_usage
from gcore_core.runtime.process.compute import DirectCompute
from gcore_core.runtime.process.config import LocalConfig
from gcore_core.runtime.process.leftovers import RECORD, clear_up
from gcore_core.runtime.process.metering import Metering
from gcore_core.runtime.process.spawn import SHARED_MEMORY, allow_open_files, spawn_process
from gcore_core.runtime.rpc.in_process import InlineNetwork
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.store.server import SlabService, StoreSpec

AGENT = "agent.0"


class LocalLauncher:
    """Starts one node agent on this machine, as a process.

    Unix sockets lie in a private directory.
    """

    def __init__(self, config: LocalConfig | None = None) -> None:
        self._config = config or LocalConfig()

    @contextlib.asynccontextmanager
    async def site(self, names: list[str], supervisor: Servable, logs: Path) -> AsyncIterator[Site]:
        from gcore_core.runtime.rpc.sockets import RpcNetwork, check_free

        allow_open_files(len(names) + 2)
        with _private_directory(self._config.socket_dir) as directory:
            addresses = self._addresses([supervisor.name, AGENT, *names], directory)
            for address in addresses.values():
                check_free(address)
            secret = secrets.token_bytes(32)
            store = _store(self._config, directory, logs.parent)
            network = RpcNetwork(addresses, secret)
            record = logs / RECORD
            spec = AgentSpec(
                name=AGENT,
                addresses=addresses,
                secret=secret,
                store=store,
                meeting=str(directory),
                record=str(record.absolute()),
            )
            agent = None
            lifeline = -1
            try:
                # What a run left in this directory whose supervisor and agent were both lost.
                await asyncio.to_thread(clear_up, record)
                await network.serve(supervisor.name, supervisor)
                agent, lifeline = await spawn_process(
                    [sys.executable, "-m", "gcore_core.runtime.process.agent"],
                    spec,
                    logs / f"{AGENT}.log",
                )
                yield Site(
                    network=network,
                    agent=network.peer(AGENT),
                    addresses=addresses,
                    secret=secret,
                    store=Path(store.directory),
                    meeting=directory,
                    end_agent=partial(end_hung, agent),
                )
            finally:
                await network.close()
                if agent is not None:
                    os.close(lifeline)  # the agent ends its workers and itself
                    try:
                        await asyncio.wait_for(agent.wait(), 15)
                    except TimeoutError:
                        await end_hung(agent)  # its workers end by their own lifelines
                        await agent.wait()
                    await asyncio.to_thread(clear_up, record)  # where the agent did not end well
                for place in (store.directory, store.spill):
                    shutil.rmtree(place, ignore_errors=True)

    def _addresses(self, names: list[str], directory: Path) -> dict[str, str]:
        if self._config.port is None:
            return {name: f"unix:{directory / name}" for name in names}
        return {name: f"tcp:127.0.0.1:{self._config.port + i}" for i, name in enumerate(names)}


@contextlib.contextmanager
def _private_directory(parent: str | None):  # type: ignore[no-untyped-def]
    try:
        directory = Path(tempfile.mkdtemp(prefix="g-core-", dir=parent))
    except OSError as error:
        raise AddressError(
            f"no directory for the run's sockets can be made: {error.strerror}",
            where=f"launcher.config.socket_dir: {parent}",
            todo="name a directory that exists and that you may write to",
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _store(config: LocalConfig, directory: Path, run: Path) -> StoreSpec:
    """Finds a place for the store: shared memory, or else the run's private directory."""
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else directory
    budget = (
        shutil.disk_usage(memory).free // 2
        if config.store_gib is None
        else int(config.store_gib * 2**30)
    )
    return StoreSpec(
        node=AGENT,
        directory=str(memory / directory.name),
        spill=str(Path(config.spill_dir or run) / f"spill-{directory.name}"),
        budget_bytes=budget,
        patience_s=config.spill_after_s,
    )


class InlineLauncher:
    """Runs everything in this process and one event loop, for a debugger. Messages are encoded as
    well.
    """

    def __init__(self, config: None = None) -> None:
        pass

    @contextlib.asynccontextmanager
    async def site(self, names: list[str], supervisor: Servable, logs: Path) -> AsyncIterator[Site]:
        with _private_directory(None) as directory:
            network = InlineNetwork()
            secret = secrets.token_bytes(32)
            store = _store(LocalConfig(), directory, logs.parent)
            agent = InlineAgent(network, store, secret)
            service = Service(AGENT)
            agent.register(service)
            view = network.view(supervisor.name)
            await network.view(AGENT).serve(AGENT, service)
            await view.serve(supervisor.name, supervisor)
            try:
                yield Site(
                    network=view,
                    agent=view.peer(AGENT),
                    addresses={name: f"inline:{name}" for name in names},
                    secret=secret,
                    store=Path(store.directory),
                    meeting=directory,
                )
            finally:
                await agent.stop()
                agent.slabs.close()


class InlineAgent:
    """Does the agent's part when workers are tasks."""

    def __init__(self, network: InlineNetwork, store: StoreSpec, secret: bytes) -> None:
        self.slabs = SlabService(store, secret, network.view(AGENT).peer)
        self._network = network
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._metering = Metering()

    def register(self, service: Service) -> None:
        self.slabs.register(service)
        service.add(SPAWN, self.spawn)
        service.add(UP, self.up)
        service.add(EXITS, self.exits)
        service.add(USAGE, self.usage)
        service.add(METER, self.meter)

    async def spawn(self, request: SpawnRequest, call: Call) -> Nothing:
        for spec in request.workers:
            if spec.ranks > 1 and spec.kind == "trainer":
                raise ConfigError(
                    "a policy on several ranks needs a process for each",
                    where=f"roles.{spec.role}.slots",
                    todo="set it to 1, or use launcher: {use: core/local}",
                )
            if spec.python not in ("", sys.executable):
                raise ConfigError(
                    "a role with an interpreter of its own needs a process of its own.",
                    where=f"roles.{spec.role}.python",
                    todo="leave it out, or use launcher: {use: core/local}",
                )
            self._tasks[spec.name] = asyncio.ensure_future(self._run(spec))
        return Nothing()

    async def up(self, request: Nothing, call: Call) -> Nothing:
        """Nothing is made ready here: a task that ends is not started again."""
        return request

    async def _run(self, spec: WorkerSpec) -> None:
        from gcore_core.runtime.process.worker import Worker

        worker = Worker(spec, self._network.view(spec.name), DirectCompute(), _cannot_give_up)
        code = 1
        try:
            await worker.run()
            code = 0
        finally:
            self._exits.put_nowait(WorkerExit(spec.name, os.getpid(), code, False, ""))

    async def exits(self, request: Nothing, call: Call) -> AsyncGenerator[WorkerExit, None]:
        while True:
            yield await self._exits.get()

    async def usage(self, request: Nothing, call: Call) -> UsageReply:
        cpu_s, memory_mib = process_usage(os.getpid())
        return UsageReply({"inline": cpu_s}, {"inline": memory_mib}, self.slabs.notes())

    async def meter(self, request: MeterRequest, call: Call) -> MeterReply:
        """Reads how long devices were in use; all workers are this process."""
        return await self._metering.read(request, dict.fromkeys(self._tasks, os.getpid()))

    async def stop(self) -> None:
        self._metering.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def _cannot_give_up(code: int) -> None:
    raise WorkerError(
        "a reward did not answer in time and cannot be ended inside this process",
        where="core/inline",
        todo="use launcher: {use: core/local}",
    )
