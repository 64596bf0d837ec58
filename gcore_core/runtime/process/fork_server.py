"""Starts workers by fork, out of a process that has imported what they will need.

To import an engine takes seconds of processor time, and to fork a process that has imported it
takes milliseconds. The node agent starts one such process for each kind of worker when the run is
up, by ``python -m gcore_core.runtime.process.fork_server --fd N ...``. It imports, at the lowest
priority, and then waits. A message on its control socket, with three file descriptors, starts a
worker:

    agent                                       server                      worker
      | (spec, lifeline, log) ------------------> | fork ------------------> | leads a group
      | <------------------------ Started(pid) -- |                          | reads its spec
      |                                           | waits for it <---------- | ends
      | <-------------------- Ended(pid, code) -- |

Only a process with a single thread and no open device can be forked: a child would have the locks
of threads that it does not have, and a driver forgets its devices. A server that an import has left
otherwise does not fork. It becomes the worker itself, and the agent starts another one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from gcore_core.runtime.messages import WorkerSpec
from gcore_core.runtime.process.spawn import decode_spec, read_spec
from gcore_core.runtime.process.worker import run_process

MESSAGE_BYTES = 4096  # at most, on the control socket
_LOWEST = 19  # the nice value of the thread that imports
_SETTLE_S = 2.0  # threads that have ended have so long to be gone from the process table
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_HARMLESS_BELOW = ("/dev/shm/", "/dev/pts/", "/dev/tty")


class ForkServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a fork server what to do.

    control: file descriptor of its end of the control socket.
    preload: modules that it imports, in this order.
    gently: import at the lowest priority.
    """

    control: int
    preload: tuple[str, ...]
    gently: bool = True


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Says that everything is imported.

    why_not: why this process cannot be forked and becomes the worker itself; "" where it can.
    """

    why_not: str


class Started(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    pid: int
    code: int


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """Says that this process ends now.

    why: what failed.
    hurry: another one may be of use that imports at ordinary priority.
    """

    why: str
    hurry: bool = False


Notice = Ready | Started | Ended | Unusable


def import_all(modules: Sequence[str], *, gently: bool) -> str:
    """Imports modules in a thread, as workers do. Returns why that failed, or "".

    gently: at the lowest priority. A process may not raise its priority again, but on Linux each
        thread has its own, so only this thread's is lowered.
    """
    failures = []

    def work() -> None:
        if gently:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # isolation point: a worker of the kind will report it
                failures.append(f"{name} does not import: {type(error).__name__}: {error}")
                return

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return "".join(failures)


def why_not_forked() -> str:
    """Returns why this process must not be forked, or "".

    Some libraries end their threads before a fork and start them anew when they are needed
    (OpenBLAS does). A first child, which does nothing, has them do so; threads that are still here
    after it are those that a child would miss.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if threads := _other_threads():
        return f"imports have left {len(threads)} more threads"
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            is_device = path.startswith("/dev/") and path not in _HARMLESS
            if is_device and not path.startswith(_HARMLESS_BELOW):
                return f"imports have opened {path}"
    return ""


def _other_threads() -> list[int]:
    """Returns the threads of this process but this one, when those that end are gone."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        others = [number for number in threads if number != threading.get_native_id()]
        if not others or time.monotonic() > deadline_s:
            return others
        time.sleep(0.005)


def _left_slow() -> bool:
    """Whether threads run at the lowest priority for ever, which a worker's must not."""
    for thread in _other_threads():
        with contextlib.suppress(ProcessLookupError):
            if os.getpriority(os.PRIO_PROCESS, thread) == 0:
                continue
            try:
                os.setpriority(os.PRIO_PROCESS, thread, 0)
            except PermissionError:
                return True
    return False


class ForkServer:
    """Serves the control socket.

    forks: False: the first request makes this process the worker.
    """

    def __init__(self, control: socket.socket, lifeline: int, *, forks: bool) -> None:
        self._control = control
        self._lifeline = lifeline
        self._forks = forks
        self._children: dict[int, int] = {}  # pidfd -> pid

    def tell(self, notice: Notice) -> None:
        self._control.send(msgspec.msgpack.encode(notice))

    def run(self) -> None:
        """Serves until the agent is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._lifeline, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor in self._children:
                    poll.unregister(descriptor)
                    self._ended(descriptor)
                    continue
                message, handed, _, _ = socket.recv_fds(self._control, 1, 3)
                if not message:  # or the lifeline has ended
                    return
                poll.register(self._start(*handed), select.POLLIN)

    def _ended(self, handle: int) -> None:
        pid = self._children.pop(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        self.tell(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _start(self, spec: int, lifeline: int, log: int) -> int:
        """Starts a worker; returns its pidfd. Does not return where this process becomes it."""
        if not self._forks:
            os.close(self._lifeline)
            self._become(spec, lifeline, log)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(reading)
            os.close(writing)
            os.close(self._lifeline)
            for handle in self._children:
                os.close(handle)
            _draw_anew()
            self._become(spec, lifeline, log)
        handle = os.pidfd_open(pid)
        self._children[handle] = pid
        os.close(writing)
        os.read(reading, 1)  # it ends when the child leads its group
        for descriptor in (reading, spec, lifeline, log):
            os.close(descriptor)
        self.tell(Started(pid))
        return handle

    def _become(self, spec: int, lifeline: int, log: int) -> NoReturn:
        self._control.close()
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        run_process(decode_spec(spec, WorkerSpec), lifeline)


def _draw_anew() -> None:
    """Seeds numpy's own generator as a new process would; Python's seeds itself after a fork.

    Workers of one kind would otherwise draw the same numbers where their code gives no seed.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()


def main() -> None:
    spec, lifeline = read_spec("a fork server; started by the node agent only", ForkServerSpec)
    control = socket.socket(fileno=spec.control)
    failure = import_all(spec.preload, gently=spec.gently)
    why_not = failure or why_not_forked()
    server = ForkServer(control, lifeline, forks=not why_not)
    if failure:
        server.tell(Unusable(failure))
    elif why_not and _left_slow():
        server.tell(Unusable(why_not, hurry=True))
    else:
        gc.collect()
        gc.freeze()  # what is loaded stays: no worker's collection copies its pages
        server.tell(Ready(why_not))
        server.run()


if __name__ == "__main__":
    main()
