"""The node agent: spawns and watches the workers of one node, owns its slabs. ``python -m
gcore_core.runtime.process.agent``.

It ends, with all its workers, when told to or when the pipe from its launcher ends; the slabs go
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import psutil

from gcore_core.contract.errors import WorkerError
from gcore_core.contract.launching import Network
from gcore_core.runtime.messages import (
    EXITS,
    KILL,
    RESTART_EXIT_CODE,
    SPAWN,
    USAGE,
    KillRequest,
    Nothing,
    SpawnRequest,
    UsageReply,
    WorkerExit,
    WorkerSpec,
)
from gcore_core.runtime.process.spawn import read_spec, spawn_process
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.store.server import SlabService, StoreSpec

log = logging.getLogger(__name__)
GRACE_S = 2.0  # of workers that are asked to end
_STACKS_S = 0.5  # for a process to write them


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells an agent, through a file descriptor."""

    name: str
    addresses: dict[str, str]
    secret: bytes
    store: StoreSpec
    meeting: (
        str  # the run's private directory; removed, like the store, when the launcher could not
    )


class Agent:
    def __init__(self, spec: AgentSpec, network: Network) -> None:
        self._spec = spec
        self.slabs = SlabService(spec.store, spec.secret, network.peer)
        self.stopped = asyncio.Event()
        self._workers: dict[str, asyncio.subprocess.Process] = {}
        self._lifelines: dict[str, int] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._stopping = False

    def register(self, service: Service) -> None:
        self.slabs.register(service)
        service.add(SPAWN, self.spawn)
        service.add(EXITS, self.exits)
        service.add(USAGE, self.usage)
        service.add(KILL, self.kill)

    async def spawn(self, request: SpawnRequest, call: Call) -> Nothing:
        for spec in request.workers:
            task = asyncio.ensure_future(self._watch(spec, await self._start(spec)))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        return Nothing()

    async def _start(self, spec: WorkerSpec) -> asyncio.subprocess.Process:
        command = [spec.python or sys.executable, "-u", "-m", "gcore_core.runtime.process.worker"]
        try:
            process, self._lifelines[spec.name] = await spawn_process(
                command, spec, spec.log, _environment(spec)
            )
        except OSError as error:
            raise WorkerError(
                f"{command[0]} cannot be started: {error.strerror}.",
                where=f"roles.{spec.role}.python",
                todo="check it by hand: <python> -m gcore_core --version",
            ) from error
        self._workers[spec.name] = process
        log.info("%s is started, pid %s", spec.name, process.pid)
        return process

    async def _watch(self, spec: WorkerSpec, process: asyncio.subprocess.Process) -> None:
        for start in range(spec.restarts + 1):
            code = await process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
            os.close(self._lifelines.pop(spec.name))
            del self._workers[spec.name]
            self.slabs.ended(f"{spec.name}-{process.pid}")
            lost = (
                code == RESTART_EXIT_CODE or code < 0
            )  # it asked for it, or was killed; else it has told a cause
            again = lost and start < spec.restarts and not self._stopping
            log.info("%s (pid %s) ended with %s", spec.name, process.pid, code)
            self._exits.put_nowait(WorkerExit(spec.name, process.pid, code, again, _tail(spec.log)))
            if not again:
                return
            spec = msgspec.structs.replace(spec, restarted=True)
            process = await self._start(spec)

    async def exits(self, request: Nothing, call: Call) -> AsyncGenerator[WorkerExit, None]:
        """Tells of every worker that ended, as it happens."""
        while True:
            yield await self._exits.get()

    async def usage(self, request: Nothing, call: Call) -> UsageReply:
        pids = {name: process.pid for name, process in self._workers.items()} | {
            self._spec.name: os.getpid()
        }
        cpu_s, memory_mib = {}, {}
        for name, pid in pids.items():
            with contextlib.suppress(OSError):
                cpu_s[name], memory_mib[name] = process_usage(pid)
        return UsageReply(cpu_s, memory_mib, self.slabs.notes())

    async def kill(self, request: KillRequest, call: Call) -> Nothing:
        if process := self._workers.get(request.name):
            await end_hung(process)
        return Nothing()

    async def stop(self, grace_s: float) -> None:
        """Ends all workers: asks, waits, kills."""
        self._stopping = True
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for process in self._workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            if self._watching:
                await asyncio.wait(set(self._watching), timeout=grace_s)


async def end_hung(process: asyncio.subprocess.Process) -> None:
    """Ends one that hangs; its stacks go to its log first, for which one that is stopped is
    woken.
    """
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(_STACKS_S)
        os.killpg(process.pid, signal.SIGKILL)


def _environment(spec: WorkerSpec) -> dict[str, str]:
    """Another interpreter must not be given this one's modules."""
    foreign = spec.python not in ("", sys.executable)
    return {
        k: v for k, v in os.environ.items() if not (foreign and k in ("PYTHONPATH", "PYTHONHOME"))
    }


def process_usage(pid: int) -> tuple[float, float]:
    """(user and system seconds of the process and its ended children, peak resident MiB).

    Raises OSError for a process that has ended.
    """
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"process {pid} has ended") from error
    cpu_s = times.user + times.system + times.children_user + times.children_system
    # psutil tells what is resident now, and not the peak. A process that has ended, but whose
    # parent has not looked yet, has no such line.
    _, found, peak_kib = Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")
    if not found:
        raise ProcessLookupError(f"process {pid} has ended")
    return cpu_s, int(peak_kib.split()[0]) / 1024


def _tail(path: str, lines: int = 20) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 8192))
            return b"\n".join(deque(file.read().splitlines(), lines)).decode("utf-8", "replace")
    except OSError as error:
        return f"its log cannot be read: {error}"


async def _main(spec: AgentSpec, lifeline: int) -> None:
    from gcore_core.runtime.rpc.sockets import RpcNetwork

    loop = asyncio.get_running_loop()
    network = RpcNetwork(spec.addresses, spec.secret)
    agent, service = Agent(spec, network), Service(spec.name)
    agent.register(service)
    loop.add_reader(lifeline, agent.stopped.set)  # readable means ended: the launcher is gone
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, agent.stopped.set)
    try:
        await network.serve(spec.name, service)
        await agent.stopped.wait()
    finally:
        loop.remove_reader(lifeline)
        await agent.stop(GRACE_S)
        await network.close()
        agent.slabs.close()
        shutil.rmtree(spec.meeting, ignore_errors=True)


def main() -> None:
    spec, lifeline = read_spec("a node agent; started by a launcher only", AgentSpec)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {spec.name} %(levelname)s %(message)s"
    )
    asyncio.run(_main(spec, lifeline))


if __name__ == "__main__":
    main()
