"""Spawns and watches the workers of one node, and owns its slabs: the node agent.

A launcher starts it by ``python -m gcore_core.node.agent``. It ends at a signal, or when
its lifeline ends: a pipe from its launcher. Workers and slabs end with their agent.

A launcher for several machines starts an agent of its own in its place, which derives from this one
and joins its store and its files with the others'.
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
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

import msgspec
import psutil

from gcore_core.contract.errors import WorkerError
from gcore_core.contract.launching import Network
from gcore_core.contract.remote_store import NodeStore, RemoteStore
from gcore_core.node.devices import Metering
from gcore_core.node.process_record import ProcessRecord
from gcore_core.node.shared_files import Maker, SharedFiles
from gcore_core.node.spawn import (
    environment_of,
    read_spec,
    send_signal,
    spawn_process,
)
from gcore_core.runtime.messages import (
    EXITS,
    KILL,
    METER,
    RESTART_EXIT_CODE,
    SPAWN,
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
from gcore_core.store.client import push_memory
from gcore_core.store.server import SlabService, StoreSpec, one_node
from gcore_core.wire.service import Call, Service
from gcore_core.workers.overruns import Hold, describe_called, describe_running, note_path

log = logging.getLogger(__name__)
GRACE_S = 2.0  # workers that are asked to end have so long before they are killed
# So often new files in shared memory are looked for, where engines make some.
_LOOK_S = 1.0
#: A worker that is stopped, as by SIGSTOP, is ended after so many times ``run.patience_s``. Where
#: it serves, who waits for it notices before.
_STOPPED_PATIENCE = 2.0
_STOPPED_LOOKS = 16  # so often the agent looks whether it is stopped, in that time
_HOLD_LOOK_S = 0.5  # so often it looks whether a reward holds a scorer for too long
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
    record: the file in which the agent writes down what it has started, see ``process_record``; ""
        for none.
    """

    name: str
    addresses: dict[str, str]
    secret: bytes
    store: StoreSpec
    meeting: str
    record: str = ""


class NodeAgent(ABC):
    """Serves one node: its slabs, its workers' starts and ends, and what they use.

    slabs: the agent's side of the store.
    """

    def __init__(self, slabs: SlabService) -> None:
        self.slabs = slabs
        self._exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._metering = Metering()

    def register(self, service: Service) -> None:
        self.slabs.register(service)
        service.add(SPAWN, self.spawn)
        service.add(EXITS, self.exits)
        service.add(USAGE, self.usage)
        service.add(METER, self.meter)

    @abstractmethod
    async def spawn(self, request: SpawnRequest, call: Call) -> Nothing:
        """Starts workers, and watches them from then on."""

    @abstractmethod
    async def usage(self, request: Nothing, call: Call) -> UsageReply:
        """Measures what the agent and its workers use, without those that have just ended."""

    @abstractmethod
    def pids(self) -> dict[str, int]:
        """Returns the name of each living worker -> its process."""

    async def exits(
        self,
        request: Nothing,
        call: Call,
    ) -> AsyncGenerator[WorkerExit, None]:
        """Streams the end of every worker, each once: those before it at once, others as they
        happen.
        """
        while True:
            yield await self._exits.get()

    async def meter(self, request: MeterRequest, call: Call) -> MeterReply:
        """Reads how long the devices of living workers were in use."""
        return await self._metering.read(request, self.pids())


class Agent(NodeAgent):
    """Starts and watches the workers of one node, and serves its slabs.

    An agent of a launcher may derive from it. What it overrides, it extends: ``register``, ``end``,
    ``signals`` and ``spawn``.

    name: of the agent.
    stopped: set when the agent is to end.
    """

    def __init__(
        self,
        spec: AgentSpec,
        network: Network,
        *,
        join: Callable[[NodeStore], RemoteStore] = one_node,
        is_remote: bool = False,
    ) -> None:
        """Prepares an agent; nothing is served yet.

        join: joins this node's store with others.
        is_remote: its supervisor is on another machine, so it cannot be seen here whether that
            lives.
        """
        super().__init__(SlabService(spec.store, spec.secret, join))
        self._spec = spec
        self.name = spec.name
        self.stopped = asyncio.Event()
        self._workers: dict[str, Process] = {}
        self._lifelines: dict[str, int] = {}  # worker -> the pipe whose end would end it
        self._watching: set[asyncio.Task[None]] = set()  # one task for each worker
        self._holds: dict[str, Hold] = {}  # scorer -> what its rewards are bounded by
        # Pids of scorers that were ended since a reward held them.
        self._held = set[int]()
        self._looking: asyncio.Task[None] | None = None
        self._makers: dict[str, Maker] = {}  # living workers
        self._files = SharedFiles()
        self._record = ProcessRecord(
            spec.record, (spec.store.directory, spec.meeting), is_remote=is_remote
        )
        self._specs: dict[str, WorkerSpec] = {}  # worker -> its spec
        self._stopping = False

    def register(self, service: Service) -> None:
        super().register(service)
        service.add(KILL, self.kill)

    async def spawn(self, request: SpawnRequest, call: Call) -> Nothing:
        if self._looking is None and any(spec.shared_memory for spec in request.workers):
            self._looking = asyncio.ensure_future(self._claim_files_regularly())
        for spec in request.workers:
            make_meeting(spec)
            process = await self._start(spec)
            task = asyncio.ensure_future(self._watch(spec, process))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        return Nothing()

    def push_memory(self, worker: str) -> Path | None:
        """Returns the file from which a worker of this node pushes weights; None for any other."""
        known = worker in self._specs
        return push_memory(Path(self._spec.store.directory), worker) if known else None

    async def _start(self, spec: WorkerSpec) -> Process:
        if spec.kind == "scorer":
            self._holds[spec.name] = Hold(note_path(spec.store.directory, spec.name))
        process, self._lifelines[spec.name] = await _spawn_worker(spec)
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
            stopped = asyncio.ensure_future(self._end_stopped(spec, process))
            holding = asyncio.ensure_future(self._end_holding(spec, process))
            code = await process.wait()
            stopped.cancel()
            holding.cancel()
            self._claim_new_files()
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
            was_held = process.pid in self._held
            self._held.discard(process.pid)  # another process may get that number
            note = note_path(spec.store.directory, spec.name)
            running = ""
            if was_held:
                running = describe_running(note)
            elif not may_help:
                running = describe_called(note)
            if stopped.done() and not stopped.cancelled():
                running = f"it was stopped for {stopped.result():g} s, twice run.patience_s"
            end = WorkerExit(spec.name, process.pid, code, again, _tail(spec.log), running)
            if not self.stopped.is_set():  # else the agent's own end is the news
                self._exits.put_nowait(end)
            if not again:
                return
            spec = msgspec.structs.replace(spec, restarted=True, was_held=was_held)
            try:
                process = await self._start(spec)
            except WorkerError as error:
                # Such as a machine without memory for one more process. Nobody called this task, so
                # it is reported as the end of the worker, now for good.
                log.error("%s", error)
                self._exits.put_nowait(
                    msgspec.structs.replace(end, restarted=False, tail=f"{error.what}")
                )
                return

    async def _end_stopped(self, spec: WorkerSpec, process: Process) -> float:
        """Ends a worker that stays stopped; returns for how many seconds it was.

        While it starts nobody can ask it anything, and so nobody else would notice.
        """
        patience_s = _STOPPED_PATIENCE * spec.settings.run.patience_s
        since_s: float | None = None  # by the clock; None: it runs
        while since_s is None or time.monotonic() - since_s < patience_s:
            await asyncio.sleep(patience_s / _STOPPED_LOOKS)
            if not _is_stopped(process.pid):
                since_s = None
            elif since_s is None:
                since_s = time.monotonic()
        log.warning("%s (pid %s) is stopped and is ended", spec.name, process.pid)
        # ``end_hung`` would wake it for its stacks, and it would go on for a moment.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return patience_s

    async def _end_holding(self, spec: WorkerSpec, process: Process) -> None:
        """Ends a scorer whose reward lets no other code run, when its time is over.

        The time in which the process is stopped does not count: that is not the reward's doing.
        """
        hold = self._holds.get(spec.name)
        if hold is None:
            return
        is_over = False
        while not is_over:
            await asyncio.sleep(_HOLD_LOOK_S)
            counts = hold.goes_on() and not _is_stopped(process.pid)
            is_over = counts and hold.is_over(_HOLD_LOOK_S)
        log.warning("%s (pid %s) is held by a reward and is ended", spec.name, process.pid)
        self._held.add(process.pid)
        await end_hung(process)

    def _claim_new_files(self) -> None:
        self._files.look(self._makers)
        self._record.hold_files(self._files.owned())

    async def _claim_files_regularly(self) -> None:
        while True:
            self._claim_new_files()
            await asyncio.sleep(_LOOK_S)

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._workers.items()}

    async def usage(self, request: Nothing, call: Call) -> UsageReply:
        self._claim_new_files()
        cpu_s: dict[str, float] = {}
        memory_mib: dict[str, float] = {}
        for name, pid in (self.pids() | {self._spec.name: os.getpid()}).items():
            with contextlib.suppress(OSError):
                cpu_s[name], memory_mib[name] = process_usage(pid)
        return UsageReply(cpu_s, memory_mib, self.slabs.notes())

    async def kill(self, request: KillRequest, call: Call) -> Nothing:
        """Ends a worker that hangs; nothing happens where it has ended already."""
        process = self._workers.get(request.name)
        if process:
            await end_hung(process)
        return Nothing()

    def end(self) -> None:
        """Tells the agent to end; ``stop`` does the work."""
        self.stopped.set()

    def signals(self) -> Mapping[int, Callable[[], None]]:
        """Returns what is called at a signal."""
        return dict.fromkeys((signal.SIGINT, signal.SIGTERM), self.end)

    async def stop(self, grace_s: float) -> None:
        """Ends everything that the agent has started."""
        self._stopping = True
        self._metering.close()
        await self._end_workers(grace_s)
        if self._looking is not None:
            self._looking.cancel()
        if not self._workers:
            self._record.close()

    async def end_workers(self) -> None:
        """Ends all workers, before the agent itself is to end."""
        self._stopping = True
        await self._end_workers(GRACE_S)

    async def _end_workers(self, grace_s: float) -> None:
        """Ends all workers: asks, waits, kills."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            self._claim_new_files()
            for process in self._workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            if self._watching:
                await asyncio.wait(set(self._watching), timeout=grace_s)


def make_meeting(spec: WorkerSpec) -> None:
    """Makes the directory where the workers of a role meet, unless another of them has it made."""
    if spec.meeting:
        Path(spec.meeting).mkdir(mode=0o700, exist_ok=True)


async def _spawn_worker(spec: WorkerSpec) -> tuple[Process, int]:
    """Starts a worker in a new interpreter; returns it and the end of its lifeline.

    Raises WorkerError when it cannot be started.
    """
    command = [spec.python or sys.executable, "-u", "-m", "gcore_core.node.worker"]
    try:
        return await spawn_process(
            command, spec, spec.log, environment_of(spec.python), signal.SIGKILL
        )
    except OSError as error:
        # Its spec or its log, on a full disk.
        if error.filename not in (None, command[0]):
            raise WorkerError(
                f"{error.filename} cannot be written: {error.strerror}.",
                where=spec.name,
                todo="free some space there, or see who may write there",
            ) from error
        raise WorkerError(
            f"{command[0]} cannot be started: {error.strerror}.",
            where=f"roles.{spec.role}.python",
            todo="check it by hand: <python> -m gcore_core --version",
        ) from error


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; one that a debugger holds is not meant."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has ended
        return False


async def end_hung(process: Process) -> None:
    """Ends a process that hangs, with all that it started. Its stacks go to its log first."""
    with contextlib.suppress(ProcessLookupError):
        send_signal(process, signal.SIGUSR1)  # writes the stacks
        send_signal(process, signal.SIGCONT)  # a stopped process would write none
        await asyncio.sleep(_STACKS_S)
        os.killpg(process.pid, signal.SIGKILL)


def process_usage(pid: int) -> tuple[float, float]:
    """Measures (user and system seconds of the process and its ended children, peak resident MiB).

    Seconds of the process itself are exact, of its ended children whole hundredths.

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


async def serve_agent(
    agent: Agent,
    network: Network,
    meeting: str,
    lifeline: int,
) -> None:
    """Serves an agent until it is told to end; then ends what it has started, and its store.

    meeting: the run's private directory, which is removed.
    lifeline: a pipe that nobody writes to. It becomes readable when it ends: who held it is gone.
    """
    loop = asyncio.get_running_loop()
    service = Service(agent.name)
    agent.register(service)
    loop.add_reader(lifeline, agent.end)
    for number, called in agent.signals().items():
        loop.add_signal_handler(number, called)
    try:
        agent.slabs.remote.open()
        await network.serve(agent.name, service)
        await agent.stopped.wait()
    finally:
        # The workers end first: they use the network and the slabs.
        loop.remove_reader(lifeline)
        await agent.stop(GRACE_S)
        await network.close()
        agent.slabs.close()
        shutil.rmtree(meeting, ignore_errors=True)


def log_as(name: str) -> None:
    """Lets this process write its log as the agent of that name."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s")


async def _main(spec: AgentSpec, lifeline: int) -> None:
    from gcore_core.wire.sockets import RpcNetwork

    network = RpcNetwork(spec.addresses, spec.secret)
    await serve_agent(Agent(spec, network), network, spec.meeting, lifeline)


def main() -> None:
    spec, lifeline = read_spec("a node agent; started by a launcher only", AgentSpec)
    log_as(spec.name)
    asyncio.run(_main(spec, lifeline))


if __name__ == "__main__":
    main()
