"""Spawns and watches the workers of one node, and owns its slabs: the node agent.

A launcher starts it by ``python -m gcore_core.runtime.process.agent``. It ends at a signal, or when
the pipe from its launcher ends: the launcher is gone then. Its workers and its slabs end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import psutil

from gcore_core.contract.errors import WorkerError
from gcore_core.contract.launching import Network
from gcore_core.runtime.messages import (
    CLEAR,
    ENDED_BY_ALARM,
    ENDED_HUNG,
    EXITS,
    KILL,
    METER,
    RESTART_EXIT_CODE,
    SPAWN,
    UP,
    USAGE,
    KillRequest,
    MeterReply,
    MeterRequest,
    Nothing,
    SpawnRequest,
    UsageReply,
    WorkerExit,
    WorkerSpec,
)
from gcore_core.runtime.process.leftovers import Record
from gcore_core.runtime.process.metering import Metering
from gcore_core.runtime.process.shared_files import Maker, SharedFiles
from gcore_core.runtime.process.spares import Process, Spares, environment_of
from gcore_core.runtime.process.spawn import read_spec, spawn_process
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.shells.overruns import describe_running, note_path
from gcore_core.runtime.store.server import SlabService, StoreSpec

log = logging.getLogger(__name__)
GRACE_S = 2.0  # workers that are asked to end have so long before they are killed
_LOOK_S = 1.0  # so often new files in shared memory are looked for, where engines make some
_STACKS_S = 0.5  # a process that hangs has so long to write its stacks
_TAIL_LINES = 20  # of a worker's log, shown when it ends
_TAIL_BYTES = 8192  # read for them


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Tells an agent what to do; its launcher writes it to a file descriptor.

    name: the agent's.
    addresses: name of every process that it may talk to -> its address.
    secret: the run's.
    store: the settings of this node's store.
    meeting: the run's private directory. The agent removes it at its end, as the launcher may be
        gone then.
    record: the file in which the agent writes down what it has started, see ``leftovers``; "" for
        none.
    """

    name: str
    addresses: dict[str, str]
    secret: bytes
    store: StoreSpec
    meeting: str
    record: str = ""


class Agent:
    """Starts and watches the workers of one node, and serves its slabs.

    slabs: the agent's side of the store.
    stopped: set when the agent is to end.
    """

    def __init__(self, spec: AgentSpec, network: Network) -> None:
        self._spec = spec
        self.slabs = SlabService(spec.store, spec.secret, network.peer)
        self.stopped = asyncio.Event()
        self._workers: dict[str, Process] = {}
        self._lifelines: dict[str, int] = {}  # worker -> the pipe whose end would end it
        self._watching: set[asyncio.Task[None]] = set()  # one task for each worker
        self._hung = set[int]()  # pids of workers that were ended because they hung
        self._looking: asyncio.Task[None] | None = None
        self._makers: dict[str, Maker] = {}  # living workers
        self._files = SharedFiles()
        self._record = Record(spec.record, (spec.store.directory, spec.meeting))
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._metering = Metering()
        self._specs: dict[str, WorkerSpec] = {}  # worker -> its spec
        self._spares = Spares(self._record)
        self._stopping = False

    def register(self, service: Service) -> None:
        self.slabs.register(service)
        service.add(SPAWN, self.spawn)
        service.add(UP, self.up)
        service.add(CLEAR, self.clear)
        service.add(EXITS, self.exits)
        service.add(USAGE, self.usage)
        service.add(METER, self.meter)
        service.add(KILL, self.kill)

    async def spawn(self, request: SpawnRequest, call: Call) -> Nothing:
        """Starts workers, and watches them from then on."""
        if self._looking is None and any(spec.shared_memory for spec in request.workers):
            self._looking = asyncio.ensure_future(self._look_regularly())
        for spec in request.workers:
            process = await self._start(spec)
            task = asyncio.ensure_future(self._watch(spec, process))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        return Nothing()

    async def up(self, request: Nothing, call: Call) -> Nothing:
        """Every worker of the run is up: from now on processes are made ready to replace them."""
        self._spares.prepare(
            (spec, self._workers[name].pid)
            for name, spec in self._specs.items()
            if name in self._workers
        )
        return Nothing()

    async def _start(self, spec: WorkerSpec) -> Process:
        ready = await self._spares.start(spec)
        process, self._lifelines[spec.name] = ready or await _spawn_worker(spec)
        self._specs[spec.name] = spec
        self._workers[spec.name] = process
        self._makers[spec.name] = Maker(process.pid, spec.shared_memory)
        self._record.started(spec.name, process.pid)
        log.info("%s is started, pid %s", spec.name, process.pid)
        return process

    async def _watch(self, spec: WorkerSpec, process: Process) -> None:
        """Waits for a worker's end, clears up after it, and starts it again where that may help.

        It may help after a kill, or where the worker asked for it. A worker that ended in any other
        way has a cause of its own, which it reported: it would end so again.
        """
        for start in range(spec.restarts + 1):
            code = await process.wait()
            self._look()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
            os.close(self._lifelines.pop(spec.name))
            del self._workers[spec.name]
            del self._makers[spec.name]
            self._files.ended(spec.name, self._makers)
            self._record.hold_files(self._files.owned())
            self._record.ended(spec.name)
            self.slabs.ended(f"{spec.name}-{process.pid}")
            is_killed = code < 0
            may_help = is_killed or code == RESTART_EXIT_CODE
            again = may_help and start < spec.restarts and not self._stopping
            log.info("%s (pid %s) ended with %s", spec.name, process.pid, code)
            ending = self._ending(process.pid, code)
            note = note_path(spec.store.directory, spec.name)
            running = describe_running(note) if ending == ENDED_BY_ALARM else ""
            end = WorkerExit(spec.name, process.pid, code, again, _tail(spec.log), running)
            self._exits.put_nowait(end)
            if not again:
                return
            spec = msgspec.structs.replace(spec, restarted=True, ending=ending)
            try:
                process = await self._start(spec)
                self._spares.replaced(spec, process.pid)
            except WorkerError as error:
                # Such as a machine without memory for one more process. Nobody called this task, so
                # it is told as the end of the worker, now for good.
                log.error("%s", error)
                self._exits.put_nowait(
                    msgspec.structs.replace(end, restarted=False, tail=f"{error.what}")
                )
                return

    def _ending(self, pid: int, code: int) -> str:
        """Returns how a worker ended, as ``WorkerSpec.ending`` says it."""
        if code == -signal.SIGALRM:
            return ENDED_BY_ALARM
        return ENDED_HUNG if pid in self._hung else ""

    def _look(self) -> None:
        """Finds out whose the new files in shared memory are, while their makers live."""
        self._files.look(self._makers)
        self._record.hold_files(self._files.owned())

    async def _look_regularly(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_LOOK_S)

    async def exits(self, request: Nothing, call: Call) -> AsyncGenerator[WorkerExit, None]:
        """Streams the end of every worker, as it happens."""
        while True:
            yield await self._exits.get()

    async def usage(self, request: Nothing, call: Call) -> UsageReply:
        """Measures what the agent and its workers use, without those that have just ended."""
        self._look()
        pids = {name: process.pid for name, process in self._workers.items()}
        pids |= self._spares.pids()
        pids[self._spec.name] = os.getpid()
        cpu_s: dict[str, float] = {}
        memory_mib: dict[str, float] = {}
        for name, pid in pids.items():
            with contextlib.suppress(OSError):
                cpu_s[name], memory_mib[name] = process_usage(pid)
        return UsageReply(cpu_s, memory_mib, self.slabs.notes())

    async def meter(self, request: MeterRequest, call: Call) -> MeterReply:
        """Reads how long the devices of living workers were in use."""
        pids = {name: process.pid for name, process in self._workers.items()}
        return await self._metering.read(request, pids)

    async def kill(self, request: KillRequest, call: Call) -> Nothing:
        """Ends a worker that hangs; nothing happens where it has ended already."""
        process = self._workers.get(request.name)
        if process:
            self._hung.add(process.pid)
            await end_hung(process)
        return Nothing()

    async def stop(self, grace_s: float) -> None:
        """Ends everything that the agent has started."""
        self._stopping = True
        self._metering.close()
        await self._spares.stop()
        await self._end_workers(grace_s)
        if self._looking is not None:
            self._looking.cancel()
        if not self._workers:
            self._record.close()

    async def clear(self, request: Nothing, call: Call) -> Nothing:
        """Ends all workers and empties the store, for a run that begins anew from a checkpoint.

        The processes that are kept ready stay. Raises WorkerError when a worker does not end.
        """
        self._stopping = True
        await self._end_workers(GRACE_S)
        # One that is just being started again is not among the workers yet, but it is watched.
        if self._watching:
            names = ", ".join(self._workers) or "a worker that is being started"
            raise WorkerError(f"{names} cannot be ended", where=self._spec.name)
        self._exits = asyncio.Queue()  # the ends of these workers are no news
        self._specs.clear()
        self.slabs.clear()
        self._stopping = False
        return Nothing()

    async def _end_workers(self, grace_s: float) -> None:
        """Ends all workers: asks, waits, kills."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            self._look()
            for process in self._workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            if self._watching:
                await asyncio.wait(set(self._watching), timeout=grace_s)


async def _spawn_worker(spec: WorkerSpec) -> tuple[Process, int]:
    """Starts a worker in a new interpreter; returns it and the end of its lifeline."""
    command = [spec.python or sys.executable, "-u", "-m", "gcore_core.runtime.process.worker"]
    try:
        return await spawn_process(
            command, spec, spec.log, environment_of(spec.python), signal.SIGKILL
        )
    except OSError as error:
        raise WorkerError(
            f"{command[0]} cannot be started: {error.strerror}.",
            where=f"roles.{spec.role}.python",
            todo="check it by hand: <python> -m gcore_core --version",
        ) from error


async def end_hung(process: Process) -> None:
    """Ends a process that hangs, with all that it started. Its stacks go to its log first."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGUSR1)  # writes the stacks
        process.send_signal(signal.SIGCONT)  # a stopped process would write none
        await asyncio.sleep(_STACKS_S)
        os.killpg(process.pid, signal.SIGKILL)


def process_usage(pid: int) -> tuple[float, float]:
    """Measures (user and system seconds of the process and its ended children, peak resident MiB).

    Seconds of the process itself are exact; those of its ended children are whole hundredths.

    Raises OSError for a process that has ended.
    """
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"process {pid} has ended") from error
    cpu_s = _cpu_s(pid) + times.children_user + times.children_system
    # psutil knows what is resident now, not the peak. A zombie has no such line: it has ended, and
    # its parent has not waited for it yet.
    status = Path(f"/proc/{pid}/status").read_text()
    _, label, value = status.partition("VmHWM:")
    if not label:
        raise ProcessLookupError(f"process {pid} has ended")
    peak_kib = int(value.split()[0])
    return cpu_s, peak_kib / 1024


def _cpu_s(pid: int) -> float:
    """Returns the user and system seconds of all threads of a process, ended ones too.

    The process's clock counts nanoseconds. ``/proc/PID/stat``, which psutil reads, counts
    hundredths of a second, and ``/proc/PID/schedstat`` one thread.

    Raises ProcessLookupError for a process that has ended.
    """
    clock = ctypes.c_int()  # clockid_t
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise ProcessLookupError(f"process {pid} has ended")
    return time.clock_gettime(clock.value)


def _tail(path: str) -> str:
    """Reads the last lines of a log, or says why there are none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            lines = deque(file.read().splitlines(), maxlen=_TAIL_LINES)
    except OSError as error:
        return f"its log cannot be read: {error}"
    return b"\n".join(lines).decode("utf-8", "replace")


async def _main(spec: AgentSpec, lifeline: int) -> None:
    from gcore_core.runtime.rpc.sockets import RpcNetwork

    loop = asyncio.get_running_loop()
    network = RpcNetwork(spec.addresses, spec.secret)
    agent = Agent(spec, network)
    service = Service(spec.name)
    agent.register(service)
    # Nobody writes to the pipe. It becomes readable when it ends: the launcher is gone.
    loop.add_reader(lifeline, agent.stopped.set)
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, agent.stopped.set)
    try:
        await network.serve(spec.name, service)
        await agent.stopped.wait()
    finally:
        # The workers end first: they use the network and the slabs.
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
