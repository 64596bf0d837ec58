"""Keeps processes ready to take the place of lost workers: the agent's side of ``fork_server``.

There is one fork server for each kind of worker: workers that run in the same interpreter and
import the same. The agent starts them when the run is up (``Spares.prepare``), so that they delay
nobody, and asks them for workers later (``Spares.start``). Where there is none yet, or it fails, a
worker is started in the ordinary way, and nothing is lost but time. A fork server that is lost is
forgotten; the agent prepares another one when it next replaces a worker of its kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from gcore_core.runtime.messages import WorkerSpec
from gcore_core.runtime.process.fork_server import (
    MESSAGE_BYTES,
    Ended,
    ForkServerSpec,
    Notice,
    Ready,
    Started,
    Unusable,
)
from gcore_core.runtime.process.leftovers import Record
from gcore_core.runtime.process.spawn import signal_at_end, spawn_process, written_spec

log = logging.getLogger(__name__)
#: Words of ``run.spares``.
AUTO, ALWAYS, NEVER = "auto", "always", "never"
#: With ``auto``, a spare is kept where so many times what a worker of its kind holds is free.
ROOM = 4
#: With ``auto``, a run must have been up for so many seconds. A shorter one would pay more for its
#: spares, an import of every engine, than a fault costs it.
PAYS_AFTER_S = 60.0
_ANSWER_S = 10.0  # a fork has so long, on a machine that is loaded
_SHELL = "gcore_core.runtime.shells"
#: What keeps libraries from starting a thread when they are imported, since a process with threads
#: cannot be forked: the allocator that pyarrow brings has one that gives memory back.
_WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
#: Threads of OpenMP that wait for each other ask so often, which is some 10 us, and then sleep. By
#: default they go on asking, and where something else wants the cores, as other workers do, that
#: takes ten times as long as one thread alone.
_SHORT_WAIT = {"GOMP_SPINCOUNT": "10000"}

#: Kind of worker -> the core's own modules that it imports when it is built.
_CORE_MODULES = {
    "generator": ("gcore_core.runtime.push", f"{_SHELL}.generator"),
    "annotator": (f"{_SHELL}.annotator",),
    "scorer": (f"{_SHELL}.overruns", f"{_SHELL}.role_sampler", f"{_SHELL}.scorer"),
    "trainer": ("gcore_core.runtime.relay", f"{_SHELL}.trainer"),
}
_NETWORK = "gcore_core.runtime.rpc.sockets"
_CGROUP = Path("/sys/fs/cgroup")
_notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


class Process(Protocol):
    """A worker's process, however it was started."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Returns the exit code; a negative one is the number of a signal."""

    def send_signal(self, signal: int) -> None:
        """Raises ProcessLookupError when the process has ended."""


def send_signal(process: Process, number: int) -> None:
    """Sends a signal to a process, and leaves its exit code to who waits for it.

    asyncio's own way looks first whether the process has ended. Where it has, that takes the exit
    code from asyncio, which then says 255.

    Raises ProcessLookupError when the process is known to have ended.
    """
    if not isinstance(process, asyncio.subprocess.Process):
        process.send_signal(number)
    elif process.returncode is None:
        os.kill(process.pid, number)
    else:
        raise ProcessLookupError(f"process {process.pid} has ended")


@dataclass(frozen=True)
class Kind:
    """Says what a fork server has ready.

    python: interpreter.
    modules: that it imports, in this order.
    """

    python: str
    modules: tuple[str, ...]


def kind_of(spec: WorkerSpec) -> Kind:
    """Returns the kind of a worker. Files of the project itself are not imported ahead."""
    sources = [factory.factory.rpartition(":")[0] for factory in spec.factories.values()]
    modules = [
        _NETWORK,
        *_CORE_MODULES.get(spec.kind, ()),
        *spec.preload,
        *(source for source in sources if not source.endswith(".py")),
    ]
    return Kind(spec.python or sys.executable, tuple(dict.fromkeys(modules)))


class ForkedProcess:
    """A worker that a fork server has started.

    The server waits for it and tells its exit code. When the server itself is lost, the code is the
    one that the worker wrote before it ended; a worker that wrote none was killed.

    handle: its pidfd.
    code: the end of the pipe into which it writes its exit code. This object closes both.
    """

    def __init__(self, pid: int, handle: int, code: int) -> None:
        self.pid = pid
        self._handle = handle
        self._pipe = code
        os.set_blocking(code, False)
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def send_signal(self, number: int) -> None:
        if self._code.done():
            raise ProcessLookupError(f"process {self.pid} has ended")
        signal.pidfd_send_signal(self._handle, number)

    def ended(self, code: int) -> None:
        """Notes its exit code, once."""
        if not self._code.done():
            os.close(self._handle)
            os.close(self._pipe)
            self._code.set_result(code)

    def has_lost_its_server(self) -> None:
        """Watches its end, from now on without the server."""
        if not self._code.done():
            loop = asyncio.get_running_loop()
            loop.add_reader(self._handle, self._unwatched, loop)

    def _unwatched(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._handle)
        try:
            written = os.read(self._pipe, 1)
        except BlockingIOError:  # a process that it left behind has the pipe open
            written = b""
        self.ended(written[0] if written else -signal.SIGKILL)


class _Server:
    """One fork server, as the agent sees it.

    name: of its log and in the agent's record.
    lost: called when it has ended, or has become a worker.
    forks: whether it starts workers; else it becomes the first one itself.
    is_ready: whether it can be asked for a worker.
    is_useless: what it imports fails to import, so another one would be of no use either.
    wants_hurry: see ``Unusable.hurry``.
    settled: set when it is ready, or never will be.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        lifeline: int,
        control: socket.socket,
        lost: Callable[[_Server], None],
    ) -> None:
        self.name = name
        self.process = process
        self.forks = False
        self.is_ready = False
        self.is_useless = False
        self.wants_hurry = False
        self.settled = asyncio.Event()
        self._lifeline = lifeline
        self._control = control
        self._lost = lost
        self._lock = asyncio.Lock()  # one start at a time
        self._started: asyncio.Future[ForkedProcess] | None = None
        self._code = -1  # the pipe for the exit code of the worker that is being started
        self._children: dict[int, ForkedProcess] = {}
        self._end = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Handles what the server tells, until it has ended or has become a worker.

        That it has ended shows in its process. The control socket may end later, since a worker
        that was just forked has it open, too, until it closes its copy.
        """
        asyncio.get_running_loop().add_reader(self._control, self._listen)
        await self.process.wait()
        self._listen()
        self._close()
        os.close(self._lifeline)

    def _listen(self) -> None:
        """Handles all messages that have come."""
        with contextlib.suppress(BlockingIOError):
            while self._control.fileno() >= 0:
                try:
                    message, handed, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
                except ConnectionError:
                    message = b""
                if message:
                    self._handle(_notices.decode(message), handed)
                else:
                    self._close()

    def _close(self) -> None:
        """Nothing comes from the server any more."""
        if self._control.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self.is_ready = False
        self.settled.set()
        if self._started is not None and not self._started.done():
            self._started.set_exception(OSError("its fork server is gone"))
        for child in self._children.values():
            child.has_lost_its_server()
        self.forget()

    def forget(self) -> None:
        """Tells the owner that this is no server any more."""
        self._lost(self)

    def _handle(self, notice: Notice, handed: list[int]) -> None:
        match notice:
            case Ready(why_not):
                self.forks = not why_not
                how = f"is started once, since {why_not}" if why_not else "forks"
                log.info("%s (pid %s) is ready; it %s", self.name, self.process.pid, how)
                self.is_ready = True
                self.settled.set()
            case Started(pid):
                (handle,) = handed
                if self._started is not None and not self._started.done():
                    # Now, and not when ``start`` goes on: the next message may tell its end.
                    child = self._children[pid] = ForkedProcess(pid, handle, self._code)
                    self._code = -1
                    self._started.set_result(child)
                else:  # nobody waits for it any more
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    os.close(handle)
            case Ended(pid, code):
                if pid in self._children:
                    self._children.pop(pid).ended(code)
            case Unusable(why, hurry):
                self.wants_hurry = hurry
                self.is_useless = not hurry
                self.settled.set()
                log.warning("%s: no process is kept ready: %s", self.name, why)

    async def start(self, spec: WorkerSpec) -> tuple[Process, int]:
        """Starts a worker; returns it and the end of its lifeline. Raises OSError, TimeoutError."""
        async with self._lock:
            reading, lifeline = os.pipe()
            try:
                process = await self._ask_for(spec, reading)
                signal_at_end(reading, process.pid, signal.SIGKILL)
            except BaseException:
                os.close(lifeline)  # a worker that was started all the same ends by it
                raise
            finally:
                os.close(reading)
            return process, lifeline

    async def _ask_for(self, spec: WorkerSpec, lifeline: int) -> Process:
        """Sends the request for a worker, and returns the process that answers it."""
        started = asyncio.get_running_loop().create_future() if self.forks else None
        self._started = started
        self._code, code = os.pipe()
        try:
            with written_spec(spec) as spec_file, open(spec.log, "ab") as output:
                handed = [spec_file.fileno(), lifeline, output.fileno(), code]
                socket.send_fds(self._control, [b"1"], handed)
            if started is None:
                return self.process
            async with asyncio.timeout(_ANSWER_S):
                process: Process = await started
                return process
        finally:
            os.close(code)
            if self._code >= 0:  # no process has it
                os.close(self._code)
                self._code = -1

    async def stop(self) -> None:
        """Kills the server. Workers that it started live on."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        await self._end


class Spares:
    """Keeps one fork server for each kind of worker.

    record: where their processes are written down.
    pays_after_s: with ``auto``, so many seconds pass before one is started.
    """

    def __init__(self, record: Record, *, pays_after_s: float = PAYS_AFTER_S) -> None:
        self._record = record
        self._pays_after_s = pays_after_s
        self._pays_from_s: float | None = None  # by the loop's clock; None: not up yet
        self._servers: dict[Kind, _Server] = {}
        self._opening: set[Kind] = set()
        self._useless: set[Kind] = set()  # kinds that cannot be kept ready
        self._held_bytes: dict[Kind, int] = {}  # by a worker, at most, as far as is known
        self._preparing: set[asyncio.Task[None]] = set()

    def prepare(self, workers: Iterable[tuple[WorkerSpec, int]]) -> None:
        """Begins to start a fork server for each kind that has none, one after the other.

        workers: (spec, pid) of the workers that run.
        """
        task = asyncio.ensure_future(self._prepare(list(workers)))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    def replaced(self, spec: WorkerSpec, pid: int) -> None:
        """A lost worker was replaced: a fork server that was lost or used up is replaced, too.

        Nothing happens for a kind that was never prepared: the run is not up yet.
        """
        if kind_of(spec) in self._held_bytes:
            self.prepare([(spec, pid)])

    async def _prepare(self, workers: list[tuple[WorkerSpec, int]]) -> None:
        """Starts the fork servers that are missing, with ``auto`` only when they pay."""
        for spec, pid in workers:
            self._measure(kind_of(spec), pid)  # at once: it may be lost before its turn comes
        now_s = asyncio.get_running_loop().time()
        if self._pays_from_s is None:
            self._pays_from_s = now_s + self._pays_after_s
        if any(spec.settings.run.spares == AUTO for spec, _ in workers):
            await asyncio.sleep(self._pays_from_s - now_s)
        for spec, _ in workers:
            kind = kind_of(spec)
            if kind in self._servers or kind in self._opening or kind in self._useless:
                continue
            if self._has_room(kind, spec):
                self._opening.add(kind)  # others may come here while this task waits
                try:
                    await self._open(kind, spec)
                finally:
                    self._opening.discard(kind)

    def _measure(self, kind: Kind, pid: int) -> None:
        """Looks how much memory a worker of a kind holds, while it lives."""
        with contextlib.suppress(psutil.NoSuchProcess):
            held_bytes = psutil.Process(pid).memory_info().rss
            self._held_bytes[kind] = max(held_bytes, self._held_bytes.get(kind, 0))

    def _has_room(self, kind: Kind, spec: WorkerSpec) -> bool:
        """Whether a process that imports what such a worker has imported may stay in memory."""
        wanted = spec.settings.run.spares
        if wanted != AUTO:
            return wanted == ALWAYS
        held_bytes = self._held_bytes.get(kind)
        return held_bytes is not None and ROOM * held_bytes <= free_bytes()

    async def _open(self, kind: Kind, spec: WorkerSpec, *, gently: bool = True) -> None:
        """Starts a fork server and waits until it is ready, or until it never will be."""
        name = f"spare.{spec.role}"

        def forget(server: _Server) -> None:
            if self._servers.get(kind) is server:
                del self._servers[kind]
                self._record.ended(name)

        try:
            server = await _spawn(name, kind, spec, forget, gently=gently)
        except OSError as error:  # such as a machine without memory for one more process
            log.warning("%s: no process is kept ready: %s", name, error)
            return
        self._servers[kind] = server
        self._record.started(name, server.process.pid)
        await server.settled.wait()
        if server.is_ready:
            return
        await server.stop()
        if server.wants_hurry and gently:
            await self._open(kind, spec, gently=False)
        elif server.wants_hurry or server.is_useless:
            self._useless.add(kind)

    async def start(self, spec: WorkerSpec) -> tuple[Process, int] | None:
        """Starts a worker by the fork server of its kind; None where there is none that can.

        Returns the process and the end of its lifeline.
        """
        kind = kind_of(spec)
        server = self._servers.get(kind)
        if server is None or not server.is_ready:
            return None
        try:
            started = await server.start(spec)
        except (OSError, TimeoutError) as error:
            log.warning("%s does not start %s: %r", server.name, spec.name, error)
            await server.stop()
            return None
        if not server.forks:  # it has become the worker
            server.forget()
        return started

    def pids(self) -> dict[str, int]:
        """Returns the name of each fork server -> its process."""
        return {server.name: server.process.pid for server in self._servers.values()}

    async def stop(self) -> None:
        """Ends all fork servers. Workers that they started live on."""
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)
        for server in list(self._servers.values()):
            await server.stop()


async def _spawn(
    name: str, kind: Kind, spec: WorkerSpec, lost: Callable[[_Server], None], *, gently: bool
) -> _Server:
    """Starts the process of a fork server. Raises OSError."""
    control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    with remote:
        process, lifeline = await spawn_process(
            [kind.python, "-u", "-m", "gcore_core.runtime.process.fork_server"],
            ForkServerSpec(control=remote.fileno(), preload=kind.modules, gently=gently),
            Path(spec.log).with_name(f"{name}.log"),
            environment_of(kind.python),
            signal.SIGKILL,
            (remote.fileno(),),
        )
    return _Server(name, process, lifeline, control, lost)


def environment_of(python: str) -> dict[str, str]:
    """Returns a worker's environment: this one, without its paths where the interpreter is another.

    Another interpreter must not find this one's modules.
    """
    waits = {} if "OMP_WAIT_POLICY" in os.environ else _SHORT_WAIT
    environment = _WITHOUT_THREADS | waits | dict(os.environ)
    if python not in ("", sys.executable):
        environment.pop("PYTHONPATH", None)
        environment.pop("PYTHONHOME", None)
    return environment


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Returns the memory that processes may still take, of the machine and of this container."""
    free = [psutil.virtual_memory().available]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such version, or "max": no limit
            limit_bytes = int((cgroup / limit).read_text())
            used_bytes = int((cgroup / used).read_text())
            statistics = (cgroup / limit).with_name("memory.stat").read_text().splitlines()
            # Pages of files that nobody used lately give way when memory is needed.
            yielding = dict(line.split() for line in statistics).get("inactive_file", "0")
            free.append(limit_bytes - used_bytes + int(yielding))
    return int(min(free))
