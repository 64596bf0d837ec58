"""Keeps the processes in which environments run: starts them, passes messages on, kills them.

What the messages are stands in ``host``. A process sees no variable of the run but those named
here, leads a group of its own, and ends with the process that started it, even where it is stopped
or hangs: the kernel kills its group when the lifeline, a pipe, has no writer any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.calls import signal_at_end
from gcore_environments import sandbox

#: Variables of the run that an environment sees. None of them holds a secret.
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHASHSEED")
#: Seconds that episodes have to close when all processes end.
ENDS_WITHIN_S = 2.0
_EXITS_WITHIN_S = 1.0  # after its standard output has ended
_KILLS_WITHIN_S = 30.0  # of what killing the process does not reach
_READ_BYTES = 1 << 20
_NO_DOOR = (
    "it said that it is ready, and had sent no socket on which its agents ask the policy; python "
    "must be an interpreter that hands sockets over (Linux, CPython 3.11 or later)"
)


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What the processes of one environment are started with."""

    environment: str
    """"file.py:Class", the file's path absolute, or "package.module:Class"."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the class is made with."""
    python: str = ""
    """The interpreter; empty: this one."""
    number: int = 1
    """How many processes."""
    turn_s: float = 30.0
    """Longest that an environment may take for a turn; ``close`` has no longer, either."""
    sandbox: str = "none"
    """See ``sandbox``."""
    directory: str = ""
    """Where modules are looked for that are not installed; empty: nowhere."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the processes."""
    readable: tuple[str, ...] = ()
    """What a confined environment reads beside its own code; absolute paths."""


class Host:
    """One process in which episodes are played.

    number: its place among the hosts.
    ready: whether its imports are over.
    process: of the system.
    door: of a confined agent, the socket on which it asks the policy; it listens in a network of
        its own. None before ``ready``, and where there is none.
    """

    def __init__(
        self,
        settings: HostSettings,
        number: int,
        replies: queue.Queue[tuple[Host, dict[str, Any]]],
    ) -> None:
        self.number = number
        self.ready = False
        self.door: socket.socket | None = None
        self._replies = replies
        self._lock = threading.Lock()
        self._backlog = bytearray()
        self._writes = False  # whether a thread sends the backlog
        self._held: list[bytes] = []
        self._holds = False  # whether what is sent waits for what follows
        self._is_killed = False
        self._command = _command(settings)
        reading, self._lifeline = os.pipe()
        passed, self._doors, told = [reading], None, dict(self._command.host)
        if self._command.has_door:
            self._doors, theirs = socket.socketpair()
            passed.append(theirs.detach())
            told["door"] = passed[-1]
        try:
            self.process = subprocess.Popen(
                self._command.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(self._command.variables),
                pass_fds=passed,
                start_new_session=True,
                bufsize=0,
            )
        except OSError:
            os.close(self._lifeline)
            self._remove_folder()
            raise
        else:
            signal_at_end(reading, self.process.pid, signal.SIGKILL)
        finally:
            for descriptor in passed:
                os.close(descriptor)
        self._pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input = self.process.stdin.fileno()
        self._output = self.process.stdout.fileno()
        os.set_blocking(self._input, False)
        name = f"environments {number}"
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"{name} reads")
        self._writer: threading.Thread | None = None
        self._reader.start()
        self._write(
            {
                "environment": settings.environment,
                "config": dict(settings.config),
                "directory": settings.directory,
                "closes_within_s": settings.turn_s,
                **told,
            }
        )

    def send(self, **message: Any) -> None:
        """Sends a message. Never waits: what the process does not take yet is kept for it."""
        self._write(message)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Sends what is sent meanwhile at the end, in one piece."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            self._pass_on(b"")

    def has_ended(self, within_s: float) -> bool:
        """Waits for the end of the process, which is left to ``kill`` to be taken away."""
        waiting = select.poll()
        waiting.register(self._pidfd, select.POLLIN)
        return bool(waiting.poll(1000 * within_s))

    def kill(self) -> None:
        """Kills the process and what it started in its group, and waits for its end."""
        with self._lock:
            if self._is_killed:
                return
            self._is_killed = True
        if self._command.kill:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    self._command.kill, capture_output=True, check=False, timeout=_KILLS_WITHIN_S
                )
        # The process is not waited for before, so the group's number is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for thread in (self._reader, self._writer):
            if thread is not None:
                thread.join()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        if self._doors is not None:
            self._doors.close()
        os.close(self._lifeline)
        os.close(self._pidfd)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._command.folder:
            shutil.rmtree(self._command.folder, ignore_errors=True)

    # -- writing -----------------------------------------------------------------------------------

    def _write(self, message: Mapping[str, Any]) -> None:
        self._pass_on(json.dumps(message).encode() + b"\n")

    def _pass_on(self, data: bytes) -> None:
        with self._lock:
            self._held.append(data)
            if self._is_killed or self._holds:
                return
            data = b"".join(self._held)
            self._held.clear()
            if not self._backlog:
                data = data[self._take(data) :]
            self._backlog += data
            if self._backlog and not self._writes:
                self._writes = True
                self._writer = threading.Thread(target=self._drain, daemon=True)
                self._writer.start()

    def _take(self, data: bytes | bytearray) -> int:
        """Writes what the pipe has room for; returns how much. The reader tells of a lost one."""
        try:
            return os.write(self._input, data)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            return len(data)

    def _drain(self) -> None:
        """Writes the backlog, in a thread, until it is empty or the process has ended."""
        waiting = select.poll()
        waiting.register(self._input, select.POLLOUT)
        waiting.register(self._pidfd, select.POLLIN)
        while True:
            ready = dict(waiting.poll())
            with self._lock:
                if self._pidfd not in ready:
                    del self._backlog[: self._take(self._backlog)]
                else:
                    self._backlog.clear()
                if not self._backlog:
                    self._writes = False
                    return

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Puts what the process says into the queue, and at last that it is lost.

        Of one that was killed from here nothing more is said.
        """
        lost: dict[str, Any] | None = None
        for line in self._lines():
            message = self._message(line)
            if message.get("lost"):
                lost = message
                break
            self._replies.put((self, message))
        lost = lost or {"lost": True, "error": self._how_it_ended()}
        if not self._is_killed:
            self._replies.put((self, lost))

    def _message(self, line: bytes) -> dict[str, Any]:
        """Reads a line; returns its message, or that the host is lost where it is none."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not _is_known(message):
            return {"lost": True, "error": f"it wrote what is no message: {line[:100]!r}"}
        if message.get("ready"):
            if self.ready:
                return {"lost": True, "error": "it said twice that it is ready"}
            if not self._has_door(message):
                return {"lost": True, "fatal": True, "error": _NO_DOOR}
            self.ready = True
        return message

    def _has_door(self, message: Mapping[str, Any]) -> bool:
        """Takes the socket that a host must have sent before it said that it is ready, if any."""
        if self._doors is None or not message.get("program"):
            return True
        self._doors.setblocking(False)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._doors, 1, 1)
        except OSError:
            return False
        if descriptors:
            self.door = socket.socket(fileno=descriptors[0])
        return bool(descriptors)

    def _lines(self) -> Iterator[bytes]:
        waiting = select.poll()
        waiting.register(self._output, select.POLLIN)
        waiting.register(self._pidfd, select.POLLIN)
        begun: list[bytes] = []
        while True:
            ready = dict(waiting.poll())
            # Its children may have the pipe open still, so the end of the process counts, too.
            data = os.read(self._output, _READ_BYTES) if self._output in ready else b""
            if not data:
                return
            *lines, rest = data.split(b"\n")
            for line in lines:
                yield b"".join((*begun, line))
                begun.clear()
            begun.append(rest)

    def _how_it_ended(self) -> str:
        """Says how the process ended, which is left to be waited for."""
        if not self.has_ended(_EXITS_WITHIN_S):
            return "it closed its standard output"
        before = "" if self.ready else " before it was ready; see what it printed in the log"
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code == os.CLD_EXITED:
            code = ended.si_status if ended else "?"
            return f"its process ended with exit code {code}{before}"
        return f"its process was killed by {signal.Signals(ended.si_status).name}{before}"


def _is_known(message: Mapping[str, Any]) -> bool:
    """Whether a message is of a kind that hosts send. An episode is named by two numbers."""
    if {"ready", "lost", "late"} & message.keys():
        return True
    key = message.get("id")
    return isinstance(key, list) and [type(number) for number in key] == [int, int]


def _command(settings: HostSettings) -> sandbox.Command:
    """Returns how a process is started. Raises ConfigError where it cannot be confined."""
    variables = {name: os.environ[name] for name in KEPT if name in os.environ}
    # The order of sets is the same in each process, or a drawn episode could not be drawn again.
    variables = {"PYTHONHASHSEED": "0", **variables, **settings.variables}
    try:
        return sandbox.command(
            settings.sandbox,
            python=settings.python,
            environment=settings.environment,
            directory=settings.directory,
            variables=variables,
            readable=settings.readable,
        )
    except sandbox.NoSandbox as error:
        raise ConfigError(f"{error}.", where="environment.config.sandbox") from error


class Hosts:
    """The processes of one environment.

    replies: what they say, as (host, message).
    restarts: how many were replaced.

    Raises ConfigError where they cannot be confined, and OSError where their interpreter cannot be
    started.
    """

    def __init__(self, settings: HostSettings) -> None:
        self.replies: queue.Queue[tuple[Host, dict[str, Any]]] = queue.Queue()
        self.restarts = 0
        self._settings = settings
        self._hosts: list[Host] = []
        try:
            for number in range(settings.number):
                self._hosts.append(Host(settings, number, self.replies))
        except BaseException:
            self.close()
            raise

    def of(self, key: tuple[int, int]) -> Host:
        """Returns the process of an episode."""
        return self._hosts[sum(key) % len(self._hosts)]

    def replace(self, host: Host) -> None:
        """Kills a process, and starts another in its place; nothing where that has been done."""
        if not self.is_current(host):
            return
        host.kill()
        self._hosts[host.number] = Host(self._settings, host.number, self.replies)
        self.restarts += 1

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Sends what each process is told meanwhile at the end, in one piece."""
        with contextlib.ExitStack() as held:
            for host in self._hosts:
                held.enter_context(host.together())
            yield

    def is_current(self, host: Host) -> bool:
        """Whether a process is one of these still."""
        return host.number < len(self._hosts) and self._hosts[host.number] is host

    def close(self) -> None:
        """Ends all processes. Open episodes are closed, for which they have ``ENDS_WITHIN_S``."""
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.send(op="end")
        until = time.monotonic() + ENDS_WITHIN_S
        for host in hosts:
            if host.ready:
                host.has_ended(max(0.0, until - time.monotonic()))
            host.kill()
