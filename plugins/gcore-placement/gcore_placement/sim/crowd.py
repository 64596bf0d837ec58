"""Launches ``sim/crowd``: a site on this machine whose emulated workers share a few host processes.

Everything else is the core's: the agent with its slabs, the sockets, a process for each controller.
``sim/inline`` does the same without any process, for an event loop whose clock may be virtual.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from gcore_core.contract.launching import (
    Endpoint,
    Item,
    NodeFacts,
    Peer,
    Reply,
    Request,
    Servable,
    Site,
    StreamEndpoint,
)
from gcore_core.kits.launching import (
    InlineLauncher,
    InlineView,
    LocalLauncher,
    SpawnRequest,
    UsageReply,
    WorkerExit,
    WorkerSpec,
    process_usage,
    spawn_process,
)
from gcore_placement.sim.config import CrowdConfig
from gcore_placement.sim.host import HostSpec, is_emulated, serve

_TAIL_BYTES = 8192


class CrowdLauncher:
    """Starts the core's local site, and deals emulated workers to host processes beside it."""

    def __init__(self, config: CrowdConfig) -> None:
        self._config = config

    async def nodes(self, devices: int | str) -> list[NodeFacts]:
        """See ``Launcher.nodes``."""
        return await LocalLauncher(self._config).nodes(devices)

    @contextlib.asynccontextmanager
    async def site(
        self, where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AsyncIterator[Site]:
        """See ``Launcher.site``; the agent of its node is a ``Hosts``."""
        async with LocalLauncher(self._config).site(where, supervisor, logs) as site:
            crowd = Hosts(site.home_node.agent, self._config.processes, logs)
            try:
                yield _with_agent(site, crowd)
            finally:
                await crowd.end()


class InlineCrowdLauncher:
    """Starts the core's inline site, and runs all workers as tasks of this event loop.

    It takes the crowd's settings, so that a job need not be changed, and ignores them.
    """

    def __init__(self, config: CrowdConfig) -> None:
        pass

    async def nodes(self, devices: int | str) -> list[NodeFacts]:
        """See ``Launcher.nodes``."""
        return await InlineLauncher().nodes(devices)

    @contextlib.asynccontextmanager
    async def site(
        self, where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AsyncIterator[Site]:
        """See ``Launcher.site``; the agent of its node is a ``Tasks``."""
        async with InlineLauncher().site(where, supervisor, logs) as site:
            crowd = Tasks(site.home_node.agent, cast(InlineView, site.network))
            try:
                yield _with_agent(site, crowd)
            finally:
                await crowd.end()


def _with_agent(site: Site, agent: Peer) -> Site:
    """Returns the site with another agent for its only node."""
    return replace(site, nodes={site.home: replace(site.home_node, agent=agent)})


class Crowd:
    """Stands for the agent towards the supervisor: starts some workers itself, passes on the rest.

    ``start`` decides which workers are started here. Their exits and their usage are merged into
    the agent's answers.
    """

    def __init__(self, agent: Peer) -> None:
        self.name = agent.name
        self._agent = agent
        self._exits: asyncio.Queue[WorkerExit | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def call(
        self,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> Reply:
        """Passes a call on to the agent, without the workers that are started here."""
        if isinstance(request, SpawnRequest):
            request = cast(Request, SpawnRequest(await self.start(request.workers)))
        answer = await self._agent.call(endpoint, request, deadline_s=deadline_s)
        if isinstance(answer, UsageReply):
            self.add_usage(answer)
        return answer

    async def stream(
        self,
        endpoint: StreamEndpoint[Request, Item],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Item, None]:
        """Yields the exits that the agent streams, and those of workers that were started here."""
        # Both sources write to one queue, which is read here; a task carries the agent's exits.
        stream = self._agent.stream(endpoint, request, deadline_s=deadline_s)
        self._tasks.append(
            asyncio.ensure_future(self._relay(cast(AsyncGenerator[WorkerExit, None], stream)))
        )
        while True:
            worker_exit = await self._exits.get()
            if isinstance(worker_exit, Exception):
                raise worker_exit
            yield cast(Item, worker_exit)

    async def _relay(self, stream: AsyncGenerator[WorkerExit, None]) -> None:
        """Puts the agent's exits, and an error that ends their stream, into the queue."""
        try:
            async with contextlib.aclosing(stream):
                async for worker_exit in stream:
                    self._exits.put_nowait(worker_exit)
        except Exception as error:  # isolation point: it is raised where the exits are read
            self._exits.put_nowait(error)

    async def close(self) -> None:
        """Closes the connection to the agent."""
        await self._agent.close()

    async def start(self, workers: list[WorkerSpec]) -> list[WorkerSpec]:
        """Starts some of the workers and returns those that are for the agent."""
        raise NotImplementedError

    def add_usage(self, usage: UsageReply) -> None:
        """Adds the processor time and memory of processes that were started here; here there are
        none.
        """

    async def end(self) -> None:
        """Ends what was started here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Hosts(Crowd):
    """Deals emulated workers to host processes, which end with the process that started them.

    Each host process holds the reading end of a pipe, its lifeline. It ends when the other end is
    closed, here or by the end of this process.
    """

    def __init__(self, agent: Peer, processes: int, logs: Path) -> None:
        super().__init__(agent)
        self._most = processes
        self._logs = logs
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._lifelines: list[int] = []

    async def start(self, workers: list[WorkerSpec]) -> list[WorkerSpec]:
        """Starts hosts for the emulated workers, and returns the other workers."""
        # Host number i gets every `self._most`-th worker, beginning with the i-th.
        emulated = [spec for spec in workers if is_emulated(spec) and _runs_here(spec)]
        for number in range(min(self._most, len(emulated))):
            spec = HostSpec(name=f"host.{number}", workers=emulated[number :: self._most])
            log = self._logs / f"{spec.name}.log"
            process, lifeline = await spawn_process(
                [sys.executable, "-u", "-m", "gcore_placement.sim.host"], spec, log
            )
            self._processes[spec.name] = process
            self._lifelines.append(lifeline)
            self._tasks.append(asyncio.ensure_future(self._watch(spec.name, process, log)))
        hosted = {spec.name for spec in emulated}
        return [spec for spec in workers if spec.name not in hosted]

    async def _watch(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        """Waits for a host's end and puts its exit, with the end of its log, into the queue."""
        code = await process.wait()
        tail = log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
        self._exits.put_nowait(WorkerExit(name, process.pid, code, False, tail))

    def add_usage(self, usage: UsageReply) -> None:
        for name, process in self._processes.items():
            with contextlib.suppress(OSError):
                usage.cpu_s[name], usage.memory_mib[name] = process_usage(process.pid)

    async def end(self) -> None:
        await super().end()
        for lifeline in self._lifelines:
            os.close(lifeline)
        await asyncio.gather(*(process.wait() for process in self._processes.values()))


class Tasks(Crowd):
    """Runs all workers, controllers too, as tasks of this event loop.

    A policy may have many ranks here, unlike inside the core's own inline agent, because emulated
    ranks exchange nothing with each other.
    """

    def __init__(self, agent: Peer, network: InlineView) -> None:
        super().__init__(agent)
        self._network = network

    async def start(self, workers: list[WorkerSpec]) -> list[WorkerSpec]:
        """Starts a task for each worker that this interpreter may run, and returns the other
        workers.
        """
        self._tasks += [
            asyncio.ensure_future(self._run(spec)) for spec in workers if _runs_here(spec)
        ]
        # The agent refuses the others, and says why.
        return [spec for spec in workers if not _runs_here(spec)]

    async def _run(self, spec: WorkerSpec) -> None:
        """Runs one worker, and puts its exit into the queue."""
        code = 1
        try:
            await serve(spec, partial(InlineView, self._network._network, spec.name))
            code = 0
        finally:
            self._exits.put_nowait(WorkerExit(spec.name, os.getpid(), code, False, ""))


def _runs_here(spec: WorkerSpec) -> bool:
    """Returns whether this interpreter is the one that the worker's role asks for."""
    return spec.python in ("", sys.executable)
