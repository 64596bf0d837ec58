"""Starts SGLang's server as a child, watches it and ends it.

SGLang ends its parent's whole process tree when one of its processes fails, so the server gets a
session of its own. It ends with its worker, in whatever way the worker ends (see
``gcore_sglang.child``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import (
    AddressError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    WorkerDied,
)
from gcore_sglang.arguments import (
    ARGUMENTS,
    EXIT_REFUSED,
    EXIT_WRONG_WEIGHTS,
    KNOWN,
    WRONG_WEIGHTS,
)
from gcore_sglang.client import Client, Refused, Unreachable

HOST = "127.0.0.1"
#: The module that runs as the server's process.
CHILD = "gcore_sglang.child"
_TRIES = 3
_POLL_S = 0.25
_END_S = 10.0
_TAIL_BYTES = 20_000
_PORT_TAKEN = "address already in use"
_SHARED_MEMORY = Path("/dev/shm")


class Server:
    """Starts, watches and ends one server.

    private: a directory of this user alone, in shared memory where there is one.
    log: the file with the server's output.

    arguments: those of SGLang's ServerArgs, without those that this class sets; a ``port`` among
        them is taken as it is.
    threads: CPU threads of each of its processes.
    connections: most requests for samples that are open at once.
    never: ids that are not to be sampled.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        context: WorkerContext,
        *,
        threads: int,
        connections: int,
        never: Sequence[int] = (),
    ) -> None:
        self.private = _private_directory()
        self.log = _log_file(context)
        self._context = context
        self._arguments = dict(arguments)
        self._environment = _environment(context, self.private, threads)
        self._connections = connections
        self._never = list(never)
        self._process: subprocess.Popen[bytes] | None = None
        self._bound_socket: socket.socket | None = None

    def start(self, timeout_s: float) -> Client:
        """Starts the server, and returns a client of it when it has drawn its first sample.

        When another process takes the port before SGLang listens on it, the server is started again
        on another one, up to three times in all. A port that was asked for by number stays.

        Raises ConfigError for a wrong argument or a port that cannot be taken, DataError when
        SGLang ends, AddressError when the port is taken by another process, DeadlineExceeded after
        ``timeout_s``.
        """
        until_s = time.monotonic() + timeout_s
        tries = 1 if "port" in self._arguments else _TRIES
        while True:
            tries -= 1
            key = secrets.token_urlsafe(32)
            port = self._launch(key)
            client = Client(f"http://{HOST}:{port}", key, connections=self._connections)
            try:
                self._wait_until_up(client, port, until_s)
                return client
            except BaseException as error:
                client.close()
                if not isinstance(error, AddressError) or not tries:
                    raise
                self._end()

    def check(self, grace_s: float = 0.0) -> None:
        """Raises WorkerDied when SGLang has ended, or ends within ``grace_s`` seconds."""
        if self._process is None:
            return
        try:
            code = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            return
        raise WorkerDied(
            f"SGLang ended with exit code {code}.",
            where=f"roles.{self._context.role}",
            why=self._last_words(),
            todo=f"Its log: {self.log}",
        )

    def close(self) -> None:
        """Ends SGLang and all processes that it has started, and removes its files."""
        self._end()
        shutil.rmtree(self.private, ignore_errors=True)

    def _launch(self, key: str) -> int:
        """Starts the child and returns the port that it is going to listen on."""
        self._bound_socket = _hold_port(self._arguments.get("port"), self._context.role)
        port: int = self._bound_socket.getsockname()[1]
        arguments = {**self._arguments, "host": HOST, "port": port, "api_key": key}
        self.private.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )
        spec = {"private": str(self.private), "arguments": arguments, "never": self._never}
        self._tell(spec)
        return port

    def _tell(self, spec: Mapping[str, Any]) -> None:
        """Writes the spec to the child's standard input, which stays open."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended; whoever waits sees it
                self._process.stdin.write(json.dumps(spec).encode() + b"\n")
                self._process.stdin.flush()

    def _wait_until_up(self, client: Client, port: int, until_s: float) -> None:
        """Waits until the server has drawn its first sample.

        Raises what ``start`` raises. At the end it makes a call with the key, since another server
        could answer on the port.
        """
        while not client.is_healthy():
            code = None if self._process is None else self._process.poll()
            if code is not None:
                raise self._why_it_ended(code, port)
            if _PORT_TAKEN in self._tail():
                raise self._port_taken(port)  # SGLang goes on trying to reach itself
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    "SGLang did not come up in time.",
                    where=f"roles.{self._context.role}",
                    why=self._last_words(),
                    todo=(
                        f"Raise roles.{self._context.role}.config.start_timeout_s. Its log: "
                        f"{self.log}"
                    ),
                )
            self._context.progress()
            time.sleep(_POLL_S)
        try:
            client.call("GET", "/model_info")  # with the key: is it ours?
        except (Refused, Unreachable) as error:
            raise AddressError(
                f"another server answers on port {port}.",
                where=f"roles.{self._context.role}",
                why=str(error),
            ) from error

    def _why_it_ended(self, code: int, port: int) -> Exception:
        """Returns the error that says why the child ended. Raises ConfigError for a wrong
        argument.
        """
        role = self._context.role
        if code == EXIT_REFUSED:
            known_arguments = json.loads((self.private / KNOWN).read_text(encoding="utf-8"))
            ARGUMENTS.check_known(self._context.engine, known_arguments, role)
        if code == EXIT_WRONG_WEIGHTS:
            told = (self.private / WRONG_WEIGHTS).read_text(encoding="utf-8")
            return DataError(**json.loads(told))
        if _PORT_TAKEN in self._tail():
            return self._port_taken(port)
        return DataError(
            "SGLang does not start with this model.",
            where=str(self._arguments["model_path"]),
            why=self._last_words() or f"It ended with exit code {code}.",
            todo=f"The log has the whole story: {self.log}",
        )

    def _port_taken(self, port: int) -> AddressError:
        """Returns the error for a port that another process has."""
        return AddressError(
            f"port {port} is taken.", where=f"roles.{self._context.role}.engine.port"
        )

    def _end(self) -> None:
        """Ends the server's processes: asks them by closing their input, then kills what is
        left.
        """
        if self._bound_socket is not None:
            self._bound_socket.close()
        process = self._process
        self._process = None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # it ends by that
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if not self._is_gone(process.pid):  # what is left of it: SGLang ended by itself, or hangs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _is_gone(self, group: int) -> bool:
        """Returns whether the last process of a group ends within a while."""
        until_s = time.monotonic() + _END_S
        while time.monotonic() < until_s:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.01)
        return False

    def _tail(self) -> str:
        """Returns the end of the log, at most ``_TAIL_BYTES``."""
        with open(self.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _last_words(self) -> str:
        """Returns the last error in the log, or its last two lines where it has none."""
        lines = [line.strip()[:300] for line in self._tail().splitlines() if line.strip()]
        errors = [
            line for line in lines if re.match(r"(\[.*\] )?([\w.]+\.)?\w*(Error|Exception)\b", line)
        ]
        return errors[-1] if errors else "\n".join(lines[-2:])


def _private_directory() -> Path:
    """Makes a directory that only this user may open, in shared memory where there is some."""
    shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="gcore-sglang-", dir=shared))


def _log_file(context: WorkerContext) -> Path:
    """Returns the path of the server's log, in the run's ``logs`` where there is such a
    directory.
    """
    directory = Path(context.directory)
    logs = directory / "logs"
    return (logs if logs.is_dir() else directory) / f"{context.role}-{context.rank}-sglang.log"


def _environment(context: WorkerContext, private: Path, threads: int) -> dict[str, str]:
    """Returns the environment variables of the server's processes."""
    environment = {
        **os.environ,
        "TMPDIR": str(private),  # SGLang's sockets lie there: nobody else may open them
        # Its processes meet through a file; the default is a store that listens on every network
        # interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{private}/rendezvous",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # SGLang keeps some tokens of the context for itself: it gets a longer one, prompts are
        # checked here.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs after the temperature
        "TQDM_DISABLE": "1",
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), HOST])),
        "no_proxy": ",".join(filter(None, [os.environ.get("no_proxy"), HOST])),
    }
    environment["OMP_NUM_THREADS"] = str(threads)
    if context.devices:
        visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[index] if index < len(visible) else str(index) for index in context.devices
        )
    if len(context.devices) > 1:
        # On a CPU SGLang wants a NUMA node for each process, or to be told the cores of each.
        environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores(len(context.devices)))
    return environment


def _cores(count: int) -> str:
    """Returns the cores of each of ``count`` processes in SGLang's words, such as ``0,2|1,3``.

    They share the cores that this process may use, which are dealt out one after the other: of the
    cores 0 to 3 the first of two processes gets 0 and 2. With fewer cores than processes, several
    processes get the same one.
    """
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[place::count] or [cores[place % len(cores)]] for place in range(count)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _hold_port(number: int | None, role: str) -> socket.socket:
    """Binds a port of this machine, so that nobody else is given it. Raises ConfigError.

    The socket does not listen, so that SGLang can bind the same port and listen on it.

    number: the port's; None: any free one.
    """
    bound_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound_socket.bind((HOST, number or 0))
    except (OSError, OverflowError) as error:
        bound_socket.close()
        raise ConfigError(
            f"port {number} cannot be taken.",
            where=f"roles.{role}.engine.port",
            why=str(error),
            todo="Leave it out: a free one is found at each start.",
        ) from error
    return bound_socket
