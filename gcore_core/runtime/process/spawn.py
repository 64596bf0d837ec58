"""Starts a process of the run: its spec comes through an unlinked file, its end with whoever
started it by a pipe.

``spawn_process`` is for who starts one, ``read_spec`` for the process itself.
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
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from gcore_core.contract.errors import ConfigError
from gcore_core.runtime.rpc.service import decoded

SHARED_MEMORY = Path("/dev/shm")
STREAMED_BYTES = 256 << 10
#: Copies as large as that go past the caches (glibc, x86): whoever reads what is pushed or stored
#: is another core
_STREAMING = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={STREAMED_BYTES:#x}"}
_OPEN_FILES = 1 << 16  # enough, and few enough for libraries that walk over all there may be
T = TypeVar("T")


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
    inherited: tuple[int, ...] = (),
) -> tuple[asyncio.subprocess.Process, int]:
    """Starts a process in a group of its own; returns it and the end of its lifeline.

    The process ends when the lifeline is closed, or when this process dies. Raises OSError when the
    interpreter cannot be started.

    command: an interpreter and its words; ``--fd`` and ``--lifeline`` are added.
    spec: a msgspec struct, with the run's secret. It goes through a file descriptor, so the secret
        is in neither argv nor the environment.
    log: the file to which the process's output is appended.
    environment: None: this process's.
    end_signal: what the kernel sends to the group when the lifeline ends. SIGCONT wakes a process
        that is stopped, so that it sees that end; SIGKILL ends all that it started, too.
    inherited: further file descriptors that the process has under the same numbers.
    """
    with written_spec(spec) as spec_file, open(log, "ab") as output:
        reading, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--fd", str(spec_file.fileno()), "--lifeline", str(reading)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(spec_file.fileno(), reading, *inherited),
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
def written_spec(spec: Any) -> Iterator[BinaryIO]:
    """Writes a spec into a file without a name, and yields the file, to be read from its start."""
    with tempfile.TemporaryFile() as file:
        file.write(msgspec.msgpack.encode(spec))
        file.seek(0)
        yield file


def signal_at_end(
    pipe: int, receiver: int, number: signal.Signals, *, is_group: bool = True
) -> None:
    """Has the kernel send a signal to a process group when nobody can write to a pipe any more.

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


def read_spec(description: str, spec: type[T]) -> tuple[T, int]:
    """Reads what this process was started with; returns it and this end of the lifeline.

    The lifeline becomes readable when the process is to end.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the spec")
    parser.add_argument(
        "--lifeline", type=int, required=True, help="pipe that ends with who started this process"
    )
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # writes every thread's stack to the log
    return decode_spec(args.fd, spec), args.lifeline


def decode_spec(descriptor: int, spec: type[T]) -> T:
    """Reads a spec from a file descriptor, and closes it."""
    with os.fdopen(descriptor, "rb") as file:
        decoder = msgspec.msgpack.Decoder(spec)
        return decoded(decoder, file.read(), "spec", f"descriptor {descriptor}")
