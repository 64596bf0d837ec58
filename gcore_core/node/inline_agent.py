"""Does the agent's part of ``core/inline``, where all workers are tasks of one process."""

from __future__ import annotations

import asyncio
import os
import sys

from gcore_core.contract.errors import ConfigError, WorkerError
from gcore_core.node.agent import NodeAgent, make_meeting, process_usage
from gcore_core.runtime.compute import DirectCompute
from gcore_core.runtime.main_thread import ThreadedLimits
from gcore_core.runtime.messages import Nothing, SpawnRequest, UsageReply, WorkerExit, WorkerSpec
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call


class InlineAgent(NodeAgent):
    """Does the agent's part when workers are tasks.

    limits: of all workers.
    """

    def __init__(self, network: InlineNetwork, store: StoreSpec, secret: bytes) -> None:
        super().__init__(SlabService(store, secret))
        self.limits = ThreadedLimits()
        self._network = network
        self._tasks: dict[str, asyncio.Task[None]] = {}

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
            make_meeting(spec)
            self._tasks[spec.name] = asyncio.ensure_future(self._run(spec))
        return Nothing()

    async def _run(self, spec: WorkerSpec) -> None:
        from gcore_core.node.worker import Worker

        network = self._network.view(spec.name)
        worker = Worker(spec, network, DirectCompute(), _cannot_give_up, self.limits)
        code = 1
        try:
            await worker.run()
            code = 0
        finally:
            self._exits.put_nowait(WorkerExit(spec.name, os.getpid(), code, False, ""))

    async def usage(self, request: Nothing, call: Call) -> UsageReply:
        cpu_s, memory_mib = process_usage(os.getpid())
        return UsageReply({"inline": cpu_s}, {"inline": memory_mib}, self.slabs.notes())

    def pids(self) -> dict[str, int]:
        return dict.fromkeys(self._tasks, os.getpid())

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
