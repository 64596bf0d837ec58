"""Starts workers by fork, out of a process that has imported what they will need.

To import an engine takes seconds of processor time, and to fork a process that has imported it
takes milliseconds. The node agent starts one such process for each kind of worker when the run is
up, by ``python -m gcore_core.runtime.process.fork_server --fd N ...``. It imports, at the lowest
priority, and then waits. A message on its control socket, with four file descriptors, starts a
worker:

    agent                                       server                      worker
      | (spec, lifeline, log, code) ------------> | fork ------------------> | leads a group
      | <-------- Started(pid), with its pidfd -- |                          | reads its spec
      | <---------------------------------------- | ------------------------ | its exit code
      |                                           | waits for it <---------- | ends
      | <-------------------- Ended(pid, code) -- |

The pidfd comes with the message, because the worker may have ended, and its number may belong to
somebody else, by the time the agent reads the number. A worker writes its exit code into a pipe
before it ends, because nobody else can tell the code when the server is lost.

Only a process with a single thread and no open device can be forked: a child would have the locks
of threads that it does not have, and a driver forgets its devices. Nor may imports have opened
sockets or pipes, which all children would share. A server that an import has left otherwise does
not fork. It becomes the worker itself, and the agent starts another one.
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
import traceback
from collections.abc import Collection, Sequence
from functools import partial
from typing import NoReturn

import msgspec

from gcore_core.contract.errors import ContractError
from gcore_core.runtime.messages import WorkerSpec
from gcore_core.runtime.process.main_thread import ThreadedLimits
from gcore_core.runtime.process.spawn import decode_spec, read_spec
from gcore_core.runtime.process.worker import run_process

MESSAGE_BYTES = 4096  # at most, on the control socket
#: Letters of an error that are told; in UTF-8 a letter has at most four bytes.
_WHY_LETTERS = MESSAGE_BYTES // 5
HANDED = 4  # file descriptors that come with a request: spec, lifeline, log, code
_LOWEST = 19  # the nice value of the thread that imports
_SETTLE_S = 2.0  # threads that have ended have so long to be gone from the process table
#: Devices that may be open at a fork: no driver keeps anything for the process that opened them.
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_HARMLESS_BELOW = ("/dev/shm/", "/dev/pts/", "/dev/tty")
_SHARED = ("socket:", "pipe:", "anon_inode:")  # so begin names of what children would share


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
    """Says that a worker was forked; its pidfd comes with the message."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Says that a worker has ended.

    code: its exit code; a negative one is the number of a signal.
    """

    pid: int
    code: int


class Unusable(msgspec.Struct, frozen=True, tag=True):
    """Says that this process ends now.

    why: what failed.
    hurry: imports have left threads at the lowest priority, and this process may not raise it. One
        that imports at ordinary priority may do.
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
                why = f"{name} does not import: {type(error).__name__}: {error}"
                failures.append(why if len(why) <= _WHY_LETTERS else f"{why[:_WHY_LETTERS]} ...")
                return

    limits = ThreadedLimits()
    with limits.noticed():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    try:
        limits.check("")
    except ContractError as error:  # in a worker, whose main thread imports, it would be allowed
        failures.append(error.what)
    return "".join(failures)


def open_files() -> dict[int, str]:
    """Returns each open file descriptor -> what it is, as the kernel names it."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is closed by now
            found[int(descriptor)] = os.readlink(f"/proc/self/fd/{descriptor}")
    return found


def why_not_forked(before: Collection[int]) -> str:
    """Returns why this process must not be forked, or "".

    before: the file descriptors that were open before the imports.

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
    for descriptor, path in open_files().items():
        is_device = path.startswith("/dev/") and path not in _HARMLESS
        is_shared = path.startswith(_SHARED)
        if descriptor not in before and (
            is_shared or (is_device and not path.startswith(_HARMLESS_BELOW))
        ):
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
    """Raises the threads that imports have left to this thread's priority.

    Returns whether that is forbidden: a worker's threads must not stay at the lowest priority.
    """
    ordinary = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for thread in _other_threads():
        with contextlib.suppress(ProcessLookupError):
            if os.getpriority(os.PRIO_PROCESS, thread) <= ordinary:
                continue
            try:
                os.setpriority(os.PRIO_PROCESS, thread, ordinary)
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

    def tell(self, notice: Notice, *handed: int) -> None:
        """Sends a notice, with copies of file descriptors."""
        socket.send_fds(self._control, [msgspec.msgpack.encode(notice)], handed)

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
                message, handed, _, _ = socket.recv_fds(self._control, 1, HANDED)
                if not message:  # or the lifeline has ended
                    return
                poll.register(self._start(*handed), select.POLLIN)

    def _ended(self, handle: int) -> None:
        pid = self._children.pop(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        self.tell(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _start(self, spec: int, lifeline: int, log: int, code: int) -> int:
        """Starts a worker; returns its pidfd. Does not return where this process becomes it."""
        if not self._forks:
            self._become(spec, lifeline, log, code)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(reading)
            os.close(writing)
            for handle in self._children:
                os.close(handle)
            _draw_anew()
            self._become(spec, lifeline, log, code)
        handle = os.pidfd_open(pid)
        self._children[handle] = pid
        os.close(writing)
        os.read(reading, 1)  # it ends when the child leads its group
        for descriptor in (reading, spec, lifeline, log, code):
            os.close(descriptor)
        self.tell(Started(pid), handle)
        return handle

    def _become(self, spec: int, lifeline: int, log: int, code: int) -> NoReturn:
        """Makes this process the worker. Nothing of the server may run in it afterwards."""
        try:
            os.close(self._lifeline)
            self._control.close()
            for output in (1, 2):
                os.dup2(log, output)
            os.close(log)
            os.set_inheritable(code, False)
            run_process(decode_spec(spec, WorkerSpec), lifeline, partial(_leave, code))
        except BaseException:
            traceback.print_exc()
            _leave(code, 1)


def _leave(pipe: int, code: int) -> NoReturn:
    """Writes the exit code into a pipe, and ends the process."""
    with contextlib.suppress(OSError):  # nobody reads any more
        os.write(pipe, bytes([code]))
    os._exit(code)


def _draw_anew() -> None:
    """Seeds numpy's own generator as a new process would; Python's seeds itself after a fork.

    Workers of one kind would otherwise draw the same numbers where their code gives no seed.
    """
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def main() -> None:
    spec, lifeline = read_spec("a fork server; started by the node agent only", ForkServerSpec)
    control = socket.socket(fileno=spec.control)
    control.set_inheritable(False)  # what imports start must not keep it open
    before = open_files()
    failure = import_all(spec.preload, gently=spec.gently)
    why_not = failure or why_not_forked(before)
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
    os._exit(0)  # a thread that an import has started must not hold it


if __name__ == "__main__":
    main()
