"""The keeper: an actor of Ray on each machine, which holds the lifeline of the machine's agent.

The agent is a process of its own. Its standard input is held here: when this actor, its node or the
run that owns the actor ends, that input ends, and the agent ends with all that it has started.

It runs in a process of Ray's. The interpreter of the agent may be another one, so nothing of the
core is called here.

The node's daemon is the parent of this process. Ray ends its workers when no process has the
daemon's id any more. In a container whose first process does not collect ended children that id
stays, and a keeper would hold its agent for ever. So it looks whether it has another parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gcore_nodes.ray.sealing import Receiver

_READ_BYTES = 1 << 16
_KEPT_BYTES = 1 << 20  # of what an agent has written and nobody has asked for
_LOOK_S = 1.0  # between two looks at the parent
_ORPHAN_CODE = 1


class Keeper:
    """Starts the agent of its machine, and ends it. Its calls are made by ``cluster``."""

    def __init__(self) -> None:
        self._receiver = Receiver()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._output = bytearray()
        self._news = asyncio.Event()
        end_with_parent(os._exit)

    async def look(self, python: str, words: list[str]) -> dict[str, Any]:
        """Runs a command that says what this machine has; returns fields of ``KeptNode``.

        python: the interpreter; "": the one that this runs on.
        """
        answer = {
            "public": self._receiver.public,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                python or sys.executable,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment_of_node(),
                start_new_session=True,
            )
        except OSError as error:
            # 127 is what a shell answers for a command that is not there.
            return answer | {"code": 127, "out": b"", "err": f"{python}: {error}".encode()}
        out, err = await process.communicate()
        return answer | {"code": process.returncode or 0, "out": out, "err": err}

    async def start(self, sealed: bytes) -> None:
        """Starts the agent. Raises SealBroken, and OSError when it cannot be started.

        sealed: an order, as ``order`` writes it.
        """
        command, environment, content = read_order(self._receiver.open(sealed))
        self._process = await asyncio.create_subprocess_exec(
            command[0] or sys.executable,
            *command[1:],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment_of_node() | environment,
            start_new_session=True,
        )
        self._reading = asyncio.ensure_future(self._read(self._process))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(content)
            await self._process.stdin.drain()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while content := await process.stdout.read(_READ_BYTES):
            self._output += content
            del self._output[:-_KEPT_BYTES]
            self._news.set()
        await process.wait()
        self._news.set()

    async def output(self) -> tuple[bytes, int | None]:
        """Waits until the agent has written something or has ended; returns both.

        The second is its exit code; None: it has not ended, or not all that it wrote is read.
        """
        assert self._process is not None and self._reading is not None
        await self._news.wait()
        self._news.clear()
        content = bytes(self._output)
        self._output.clear()
        # The exit code may be known before the last lines are read, which say why it ended.
        code = self._process.returncode if self._reading.done() else None
        if code is not None:
            self._news.set()  # for whoever asks again
        return content, code

    async def close(self) -> None:
        """Ends the agent's standard input."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def kill(self) -> None:
        """Ends the agent by force; the lifelines of its workers end with it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def end_with_parent(leave: Callable[[int], object], look_s: float = _LOOK_S) -> threading.Thread:
    """Ends this process when its parent has ended, also one that nobody has collected.

    leave: ends this process at once, with an exit code.
    look_s: seconds between two looks.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(look_s)
        leave(_ORPHAN_CODE)

    thread = threading.Thread(target=watch, daemon=True, name="parent")
    thread.start()
    return thread


def order(command: list[str], environment: dict[str, str], content: bytes) -> bytes:
    """Writes what a keeper is to do, to be sealed.

    command: an interpreter ("": the keeper's own) and its words.
    environment: variables beside those of the node.
    content: for the standard input.
    """
    head = json.dumps({"command": command, "environment": environment}).encode()
    return len(head).to_bytes(4, "big") + head + content


def read_order(opened: bytes) -> tuple[list[str], dict[str, str], bytes]:
    """Returns the command, the environment and the content of an order."""
    end = 4 + int.from_bytes(opened[:4], "big")
    head = json.loads(opened[4:end])
    return head["command"], head["environment"], opened[end:]


def environment_of_node() -> dict[str, str]:
    """Returns the environment without what Ray has set for its own task.

    Ray sets OMP_NUM_THREADS to the CPUs of the actor unless the node was started with it. That
    would make sums of floats depend on the way a run was started.
    """
    environment = dict(os.environ)
    try:
        begun_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environment
    if not any(line.startswith(b"OMP_NUM_THREADS=") for line in begun_with):
        environment.pop("OMP_NUM_THREADS", None)
    return environment
