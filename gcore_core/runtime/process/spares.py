"""Keeps processes ready to take the place of lost workers: the agent's side of ``fork_server``.

There is one fork server for each kind of worker: workers that run in the same interpreter and
import the same. The agent starts them when the run is up (``Spares.prepare``), so that they delay
nobody, and asks them for workers later (``Spares.start``). Where there is none yet, or it fails, a
worker is started in the ordinary way, and nothing is lost but time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable
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
_ANSWER_S = 10.0  # a fork has so long, on a machine that is loaded
_SHELL = "gcore_core.runtime.shells"
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

    The server waits for it and tells its exit code. When the server itself is lost, the code is
    not known; the worker then counts as killed.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
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
            self._code.set_result(code)

    def has_lost_its_server(self) -> None:
        """Watches its end, from now on without its code."""
        if not self._code.done():
            loop = asyncio.get_running_loop()
            loop.add_reader(self._handle, self._unwatched, loop)

    def _unwatched(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._handle)
        self.ended(-signal.SIGKILL)


class _Server:
    """One fork server, as the agent sees it.

    name: of its log and in the agent's record.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        lifeline: int,
        control: socket.socket,
    ) -> None:
        self.name = name
        self.process = process
        self.forks = False
        self.is_ready = False
        self.wants_hurry = False
        self.settled = asyncio.Event()  # it is ready, or will never be
        self._lifeline = lifeline
        self._control = control
        self._lock = asyncio.Lock()  # one start at a time
        self._started: asyncio.Future[ForkedProcess] | None = None
        self._children: dict[int, ForkedProcess] = {}
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._wait())]

    async def _listen(self) -> None:
        """Handles what the server tells, until it is gone or has become a worker."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while message := await loop.sock_recv(self._control, MESSAGE_BYTES):
                self._handle(_notices.decode(message))
        self.is_ready = False
        self.settled.set()
        if self._started is not None and not self._started.done():
            self._started.set_exception(OSError("its fork server is gone"))
        for child in self._children.values():
            child.has_lost_its_server()

    def _handle(self, notice: Notice) -> None:
        match notice:
            case Ready(why_not):
                self.forks = not why_not
                how = f"is started once, since {why_not}" if why_not else "forks"
                log.info("%s (pid %s) is ready; it %s", self.name, self.process.pid, how)
                self.is_ready = True
                self.settled.set()
            case Started(pid):
                child = self._children[pid] = ForkedProcess(pid)
                if self._started is not None and not self._started.done():
                    self._started.set_result(child)
                else:  # nobody waits for it any more
                    child.send_signal(signal.SIGKILL)
            case Ended(pid, code):
                self._children.pop(pid).ended(code)
            case Unusable(why, hurry):
                self.wants_hurry = hurry
                log.warning("%s: no process is kept ready: %s", self.name, why)

    async def _wait(self) -> None:
        await self.process.wait()
        os.close(self._lifeline)
        self._control.close()

    async def start(self, spec: WorkerSpec) -> tuple[Process, int]:
        """Starts a worker; returns it and the end of its lifeline. Raises OSError, TimeoutError."""
        async with self._lock:
            reading, lifeline = os.pipe()
            try:
                self._started = asyncio.get_running_loop().create_future()
                with written_spec(spec) as spec_file, open(spec.log, "ab") as output:
                    handed = [spec_file.fileno(), reading, output.fileno()]
                    socket.send_fds(self._control, [b"1"], handed)
                process: Process = self.process
                if self.forks:
                    async with asyncio.timeout(_ANSWER_S):
                        process = await self._started
                signal_at_end(reading, process.pid, signal.SIGKILL)
            except BaseException:
                os.close(lifeline)
                raise
            finally:
                os.close(reading)
            return process, lifeline

    async def stop(self) -> None:
        """Kills the server. Workers that it started live on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await asyncio.gather(*self._tasks)


class Spares:
    """Keeps one fork server for each kind of worker.

    record: where their processes are written down.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._servers: dict[Kind, _Server] = {}
        self._preparing: set[asyncio.Task[None]] = set()

    def prepare(self, workers: Iterable[tuple[WorkerSpec, int]]) -> None:
        """Begins to start a fork server for each kind that has none, one after the other.

        workers: (spec, pid) of the workers that run.
        """
        task = asyncio.ensure_future(self._prepare(list(workers)))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepare(self, workers: list[tuple[WorkerSpec, int]]) -> None:
        for spec, pid in workers:
            kind = kind_of(spec)
            if kind not in self._servers and _has_room(spec, pid):
                await self._open(kind, spec)

    async def _open(self, kind: Kind, spec: WorkerSpec, *, gently: bool = True) -> None:
        """Starts a fork server and waits until it is ready, or until it never will be."""
        name = f"spare.{spec.role}"
        try:
            server = await _spawn(name, kind, spec, gently=gently)
        except OSError as error:  # such as a machine without memory for one more process
            log.warning("%s: no process is kept ready: %s", name, error)
            return
        self._servers[kind] = server
        self._record.started(name, server.process.pid)
        await server.settled.wait()
        if not server.is_ready:
            await self._drop(kind)
            if gently and server.wants_hurry:
                await self._open(kind, spec, gently=False)

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
            await self._drop(kind)
            return None
        if not server.forks:  # it has become the worker
            del self._servers[kind]
            self._record.ended(server.name)
            self.prepare([(spec, started[0].pid)])
        return started

    async def _drop(self, kind: Kind) -> None:
        server = self._servers.pop(kind, None)
        if server is not None:
            await server.stop()
            self._record.ended(server.name)

    def pids(self) -> dict[str, int]:
        """Returns the name of each fork server -> its process."""
        return {server.name: server.process.pid for server in self._servers.values()}

    async def stop(self) -> None:
        """Ends all fork servers. Workers that they started live on."""
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)
        for kind in list(self._servers):
            await self._drop(kind)


async def _spawn(name: str, kind: Kind, spec: WorkerSpec, *, gently: bool) -> _Server:
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
    return _Server(name, process, lifeline, control)


def environment_of(python: str) -> dict[str, str]:
    """Returns a worker's environment: this one, without its paths where the interpreter is another.

    Another interpreter must not find this one's modules.
    """
    environment = dict(os.environ)
    if python not in ("", sys.executable):
        environment.pop("PYTHONPATH", None)
        environment.pop("PYTHONHOME", None)
    return environment


def _has_room(spec: WorkerSpec, pid: int) -> bool:
    """Whether a process that imports what this worker has imported may stay in memory."""
    wanted = spec.settings.run.spares
    if wanted != AUTO:
        return wanted == ALWAYS
    try:
        needed_bytes = ROOM * psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return False
    return bool(needed_bytes <= free_bytes())


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
