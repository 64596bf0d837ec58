"""The supervisor's side of the process that speaks with Ray (``cluster``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from gcore_core.contract.errors import ConfigError, WorkerError
from gcore_nodes.ray.messages import (
    Close,
    Ended,
    Event,
    Failed,
    Found,
    KeptNode,
    Kill,
    Output,
    Request,
    Start,
    Waiting,
    Wish,
)

COMMAND = (sys.executable, "-m", "gcore_nodes.ray.cluster")
_LINE_BYTES = 1 << 26
_KEPT_LINES = 200  # of what the process writes beside its events
_TAIL_LINES = 3  # of these, shown when it fails
_CAUSE = re.compile(r"Check failed|Error\b|cannot|failed to", re.IGNORECASE)
_ENDS_S = 20.0  # it has so long to give everything back
_KILLED_S = 5.0
_JOIN_S = 60.0  # it has so long to join the cluster, beyond ``wait_s``; Ray's own limits are less


class KeptAgent:
    """An agent that a keeper has started; see ``StartedAgent``."""

    def __init__(self, host: str, log: Path, send: Callable[[Request], None]) -> None:
        self.command = f"a keeper of Ray on {host}"
        self.returncode: int | None = None
        self._host = host
        self._log = log
        self._send = send
        self._ended = asyncio.Event()

    def write(self, content: bytes) -> None:
        """Appends what the agent has written to its log here."""
        with self._log.open("ab") as file:
            file.write(content)

    def end(self, code: int, why: str) -> None:
        """The agent has ended, or nobody can know more of it."""
        if self.returncode is not None:
            return
        if why:
            self.write(f"{why}\n".encode())
        self.returncode = code
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()

    def close(self) -> None:
        self._send(Close(self._host))

    async def kill(self) -> None:
        self._send(Kill(self._host))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _KILLED_S)


class Link:
    """The process that speaks with Ray, and what it has told.

    nodes: those that it has found.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, wish: Wish, say: Callable[[str], None]
    ) -> None:
        """say: is told every half a minute what is missing."""
        self._process = process
        self._wish = wish
        self._say = say
        self._agents: dict[str, KeptAgent] = {}
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self.nodes: list[KeptNode] = []

    async def find(self) -> None:
        """Waits for the machines. Raises ConfigError; WorkerError when one is lost meanwhile."""
        self._write(self._wish)
        try:
            async with asyncio.timeout(self._wish.wait_s + self._wish.start_s + _JOIN_S):
                while not self.nodes:
                    self._look(await self._event())
        except TimeoutError as error:
            raise _refused(Failed("Ray did not answer", self._last_words())) from error

    async def follow(self) -> None:
        """Takes what is told of agents, until the process has ended."""
        with contextlib.suppress(ConfigError, WorkerError):
            while True:
                self._look(await self._event())
        for agent in self._agents.values():
            agent.end(255, "the process that speaks with Ray has ended")

    async def read_errors(self) -> None:
        """Keeps the last lines that the process writes beside its events."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            if text := line.decode("utf-8", "replace").strip():
                self._errors.append(text)

    def _last_words(self) -> str:
        """Returns the lines that say most: Ray writes its stack behind the cause of its end."""
        causes = [line for line in self._errors if _CAUSE.search(line)]
        return "\n".join((causes or list(self._errors))[-_TAIL_LINES:]) or "it wrote nothing"

    async def _event(self) -> Event:
        """Returns what is told next. Raises ConfigError when the process has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise _refused(
                Failed(f"the process that speaks with Ray ended with {code}", self._last_words())
            )
        event: Event = msgspec.json.decode(line, type=Event)
        return event

    def _look(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise _refused(event)
        if isinstance(event, Waiting):
            self._say(event.why)
        elif isinstance(event, Found):
            self.nodes = event.nodes
        elif isinstance(event, Output):
            self._agents[event.host].write(event.content)
        elif isinstance(event, Ended):
            self._agents[event.host].end(event.code, event.why)

    def start(self, host: str, sealed: bytes, log: Path) -> KeptAgent:
        """Has the keeper of a host start its agent."""
        agent = self._agents[host] = KeptAgent(host, log, self._write)
        self._write(Start(host, sealed))
        return agent

    def _write(self, message: Wish | Request) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")


def _refused(failed: Failed) -> ConfigError | WorkerError:
    kind = WorkerError if failed.is_lost else ConfigError
    return kind(failed.what, where=failed.where, why=failed.why, todo=failed.todo)


@contextlib.asynccontextmanager
async def linked(
    wish: Wish, say: Callable[[str], None], command: Sequence[str] = COMMAND
) -> AsyncIterator[Link]:
    """Starts the process that speaks with Ray, finds the machines, and gives them back at the end.

    Raises ConfigError where there are none.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        start_new_session=True,  # what a terminal sends to the run does not reach it
    )
    link = Link(process, wish, say)
    tasks = [asyncio.ensure_future(link.read_errors())]
    try:
        await link.find()
        tasks.append(asyncio.ensure_future(link.follow()))
        yield link
    finally:
        await _end(process)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Has the process end, which gives everything back to Ray; kills it when that takes long."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _ENDS_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
