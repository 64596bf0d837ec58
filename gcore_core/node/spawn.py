"""Starts a process of the run. Its spec comes through an unlinked file, and its lifeline is a pipe.

The *lifeline* ends when the process that holds its other end does, or closes it; then the process
that was started is to end. ``spawn_process`` is for who starts one, ``read_spec`` for the process
itself. To another machine, where no descriptor reaches, a launcher sends the spec by standard input
(``input_of``), framed as any message. The process ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import fcntl
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.node.inherited import reset_signals
from gcore_core.runtime.files import STREAMED_BYTES
from gcore_core.wire.framing import framed, receive
from gcore_core.wire.service import decoded

#: Copies of ``STREAMED_BYTES`` or more go past the caches (glibc, x86): what is pushed or stored is
#: read by another core.
_STREAMING = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={STREAMED_BYTES:#x}"}
#: Threads of OpenMP that wait for each other ask so often, which is some 10 us, and then sleep. By
#: default they go on asking, and where something else wants the cores, as other workers do, that
#: takes ten times as long as one thread alone.
_SHORT_WAIT = {"GOMP_SPINCOUNT": "10000"}
_SPEC_LIMIT_BYTES = 256 << 20
_LAST_S = 30.0  # a process has so long to end by itself after its standard input did
# Enough, and few enough for libraries that try every possible descriptor.
_OPEN_FILES = 1 << 16
T = TypeVar("T")


def send_signal(process: Process, number: int) -> None:
    """Sends a signal to a process, and leaves its exit code to who waits for it.

    asyncio's own way looks first whether the process has ended. Where it has, that takes the exit
    code from asyncio, which then says 255.

    Raises ProcessLookupError when the process is known to have ended.
    """
    if process.returncode is not None:
        raise ProcessLookupError(f"process {process.pid} has ended")
    os.kill(process.pid, number)


def environment_of(python: str) -> dict[str, str]:
    """Returns a worker's environment: this one, without its paths where the interpreter is another.

    Another interpreter must not find this one's modules.
    """
    waits = {} if "OMP_WAIT_POLICY" in os.environ else _SHORT_WAIT
    environment = waits | dict(os.environ)
    if python not in ("", sys.executable):
        environment.pop("PYTHONPATH", None)
        environment.pop("PYTHONHOME", None)
    return environment


def allow_open_files(peers: int) -> None:
    """Raises this process's limit, which those it starts inherit, so that each may speak with
    ``peers`` others.

    Raises ConfigError when the system forbids it.
    """
    required_files = 2 * peers + 128  # a connection to each and one from each
    soft, hard = (
        limit if limit >= 0 else 1 << 62 for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if hard < required_files:
        raise ConfigError(
            (
                f"a process may open {hard} files here, and one that speaks with {peers} others "
                f"needs {required_files}."
            ),
            where="launcher",
            todo=(
                f"sudo prlimit --pid $$ --nofile={required_files}, or lower controller.shards "
                "or slots of roles"
            ),
        )
    if soft < (new_limit := min(hard, max(required_files, _OPEN_FILES))):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (new_limit, hard if hard < 1 << 62 else resource.RLIM_INFINITY)
        )


async def spawn_process(
    command: list[str],
    spec: Any,
    log: str | Path,
    environment: Mapping[str, str] | None = None,
    end_signal: signal.Signals = signal.SIGCONT,
) -> tuple[Process, int]:
    """Starts a process in a group of its own; returns it and the end of its lifeline.

    The process ends when the lifeline is closed, or when this process dies. Raises OSError when the
    interpreter cannot be started, or when its spec or its log cannot be written: ``filename`` names
    what failed, if it is known.

    command: an interpreter and its words; ``--fd`` and ``--lifeline`` are added.
    spec: a msgspec struct, with the run's secret. It goes through a file descriptor, so the secret
        is in neither argv nor the environment.
    log: the file to which the process's output is appended.
    environment: None: this process's.
    end_signal: what the kernel sends to the group when the lifeline ends. SIGCONT wakes a process
        that is stopped, so that it sees that end; SIGKILL ends all that it started, too.
    """
    reading, lifeline = os.pipe()
    try:
        with _written_spec(spec) as spec_file, open(log, "ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--fd", str(spec_file.fileno()), "--lifeline", str(reading)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(spec_file.fileno(), reading),
                start_new_session=True,
                env=_STREAMING | dict(os.environ if environment is None else environment),
            )
            signal_at_end(reading, process.pid, end_signal)
    except BaseException:
        os.close(lifeline)  # one that was started all the same ends by it
        raise
    finally:
        os.close(reading)
    return process, lifeline


@contextlib.contextmanager
def _written_spec(spec: Any) -> Iterator[BinaryIO]:
    """Writes a spec into a file without a name, and yields the file, to be read from its start.

    An OSError of the writing has a ``filename``: the directory for temporary files.
    """
    try:
        file = _spec_file(spec)
    except OSError as error:
        # The last: none is usable.
        directory = error.filename or tempfile.tempdir or "TMPDIR"
        raise OSError(error.errno, error.strerror or str(error), directory) from error
    with file:
        yield file


def _spec_file(spec: Any) -> BinaryIO:
    with contextlib.ExitStack() as stack:
        file: BinaryIO = stack.enter_context(tempfile.TemporaryFile())
        file.write(msgspec.msgpack.encode(spec))
        file.seek(0)
        stack.pop_all()
    return file


def signal_at_end(
    pipe: int, receiver: int, number: signal.Signals, *, is_group: bool = True
) -> None:
    """Lets the kernel send a signal to a process group when nobody can write to a pipe any more.

    It reaches processes that are stopped or hang, which would not read the pipe. The settings
    belong to the open pipe, not to this descriptor or process: they hold as long as the process
    that inherited it has it open.

    receiver: the group; without ``is_group`` a single process.

    Linux only. Elsewhere nothing happens here, and the process ends when it reads its lifeline.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        fcntl.fcntl(pipe, fcntl.F_SETSIG, number)
        owner = -receiver if is_group else receiver  # negative: a group
        fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def input_of(spec: Any) -> bytes:
    """Returns what a process that is started with ``--stdin`` reads first."""
    return framed(msgspec.msgpack.encode(spec))


def read_spec(description: str, spec: type[T]) -> tuple[T, int]:
    """Reads what this process was started with; returns it and this end of the lifeline.

    Signals that were ignored or blocked arrive from here on. The lifeline becomes readable when the
    process is to end.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fd", type=int, help="file descriptor of the spec")
    parser.add_argument("--lifeline", type=int, help="pipe that ends with who started this process")
    parser.add_argument(
        "--stdin",
        action="store_true",
        help="in place of both: the spec comes by standard input, and its end is the lifeline",
    )
    args = parser.parse_args()
    if not args.stdin and (args.fd is None or args.lifeline is None):
        parser.error("--fd and --lifeline are needed, or else --stdin")
    reset_signals()
    faulthandler.register(signal.SIGUSR1)  # writes every thread's stack to the log
    if args.stdin:
        return _read_input(spec), _lifeline_of_input()
    return _spec_from_descriptor(args.fd, spec), args.lifeline


def _read_input(spec: type[T]) -> T:
    """Reads a spec from standard input, and not a byte more.

    Raises ContractError when the input ends before the spec does, or is none.
    """
    try:
        content = receive(partial(os.read, 0), _SPEC_LIMIT_BYTES)
    except ConnectionError as error:
        raise ContractError(
            f"standard input {error} of the spec",
            where="--stdin",
            todo="see whether the launcher's command passes its standard input on (ssh -n does "
            "not; kubectl exec needs -i)",
        ) from None
    except ContractError as error:
        raise ContractError(
            "standard input does not begin with a spec",
            where="--stdin",
            why=error.what,
            todo="only a launcher starts this process, by a command that adds nothing to its input",
        ) from None
    return decoded(msgspec.msgpack.Decoder(spec), content, "spec", "standard input")


def _lifeline_of_input() -> int:
    """Returns the reading end of a pipe that ends with standard input.

    What comes by standard input from now on is thrown away. A process that has not ended
    ``_LAST_S`` after its input is killed: it hangs, and its starter cannot reach it.
    """
    # A process that is stopped is woken, so that it sees the end.
    signal_at_end(0, os.getpid(), signal.SIGCONT, is_group=False)
    reading, writing = os.pipe()

    def wait() -> None:
        with contextlib.suppress(OSError):  # a connection that was reset has ended, too
            while os.read(0, 65536):
                pass
        os.close(writing)
        time.sleep(_LAST_S)
        os.kill(os.getpid(), signal.SIGKILL)  # its workers have lifelines of their own

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    return reading


def _spec_from_descriptor(descriptor: int, spec: type[T]) -> T:
    with os.fdopen(descriptor, "rb") as file:
        decoder = msgspec.msgpack.Decoder(spec)
        return decoded(decoder, file.read(), "spec", f"descriptor {descriptor}")
