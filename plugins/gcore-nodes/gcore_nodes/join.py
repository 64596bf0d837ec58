"""Joins a run from one of its nodes: ``g-core nodes join HOST:PORT``.

The same command is started on every node, by whatever starts processes there. It looks for home
until home answers, starts the node agent that home describes, and ends with the run.

    exit code 0     the run ended well, or goes on without this node, after a SIGTERM or a drain
              2     home has refused this node: its token, its version or its name
              5     the run ended with an error, or home was lost and has not come back
              7     nobody to join was found in time
              130, 143     Ctrl-C, a second SIGTERM; the first one where no run is joined

The first SIGTERM asks the run to do without this node. Its agent goes on until the run's next
checkpoint, from which the run begins again without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gcore_core import __version__
from gcore_core.contract.errors import AddressError, ConfigError, GcoreError, WorkerError
from gcore_nodes.agent import SIGTERM_PASSED_ON, MachineAgentSpec
from gcore_nodes.channel import (
    Channel,
    End,
    Ended,
    Joining,
    Output,
    Over,
    Start,
    Turned,
    connect,
)
from gcore_nodes.facts import machine_facts
from gcore_nodes.spawn_over_input import spawn_over_input
from gcore_nodes.token import TOKEN_VARIABLE, read_token

_AGENT = (sys.executable, "-u", "-m", "gcore_nodes.agent")
_CONNECT_S = 20.0  # for one try to reach home; less when little time is left
_LEAST_CONNECT_S = 2.0
_AGAIN_S = 0.5  # between two tries to reach home
_NOT_NEEDED_S = 5.0  # between two tries of a node that a run does not need
_AGENT_ENDS_S = 15.0
_LET_GO_S = 15.0  # behind the end of its agent, a node that leaves waits so long for home's word
_SAID_EVERY_S = 30.0
_READ_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Holds what a person wants of the command.

    host, port: where home lets nodes in.
    name: of this node.
    wait_s: for how long home is looked for.
    again_s: for how long it is looked for again when it was lost.
    """

    host: str
    port: int
    token: bytes
    name: str
    wait_s: float
    again_s: float


class Member:
    """Is this node, as a member of a run."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._agent: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._channel: Channel | None = None
        self._is_leaving = False

    def leave(self) -> bool:
        """Has the agent ask to leave; returns whether there is one.

        When the agent has ended and home says nothing more, the connection is closed.
        """
        agent = self._agent
        if agent is None or self._channel is None or agent.returncode is not None:
            return False
        _say(f"{self._wish.name} leaves at the run's next checkpoint; again: at once")
        self._is_leaving = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent.pid, SIGTERM_PASSED_ON)
        self._tasks.append(asyncio.ensure_future(self._close_behind(agent, self._channel)))
        return True

    async def _close_behind(self, agent: asyncio.subprocess.Process, channel: Channel) -> None:
        await agent.wait()
        await asyncio.sleep(_LET_GO_S)
        await channel.close()

    async def run(self) -> None:
        """Is a member until the run has ended well.

        Raises AddressError when nobody to join is found, ConfigError when home refuses this node,
        and WorkerError when the run ends in another way.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wish.wait_s
        last = Over(well=True, again=True)
        while True:
            try:
                channel = await self._connected(until)
            except AddressError:
                if last.well:
                    raise
                raise _ended_badly(last) from None
            last, pause_s = await self._served(channel)
            if last.well and not last.again:
                return
            if not last.again:
                raise _ended_badly(last)
            until = loop.time() + (self._wish.wait_s if last.well else self._wish.again_s)
            await asyncio.sleep(pause_s)

    async def _connected(self, until: float) -> Channel:
        """Returns a connection with home. Raises AddressError when there is none in time."""
        wish = self._wish
        loop = asyncio.get_running_loop()
        said = -_SAID_EVERY_S
        while True:
            timeout_s = min(_CONNECT_S, max(_LEAST_CONNECT_S, until - loop.time()))
            try:
                return await connect(wish.host, wish.port, wish.token, timeout_s)
            except ConfigError:
                raise
            except (OSError, GcoreError) as error:  # TimeoutError is an OSError
                why = str(error).partition("\n")[0] or type(error).__name__
            if loop.time() >= until:
                raise AddressError(
                    f"nobody to join was found in {wish.wait_s:g} s",
                    where=f"{wish.host}:{wish.port}",
                    why=why,
                    todo="see whether g-core run waits there, and whether this node reaches it",
                )
            if loop.time() - said >= _SAID_EVERY_S:
                said = loop.time()
                _say(f"waiting for {wish.host}:{wish.port}: {why}")
            await asyncio.sleep(_AGAIN_S)

    async def _served(self, channel: Channel) -> tuple[Over, float]:
        """Does what home says, until it is over; returns how, and how long to rest then."""
        self._channel = channel
        facts = msgspec.msgpack.encode(machine_facts())
        channel.send(Joining(self._wish.name, __version__, sys.executable, facts))
        _say(f"{self._wish.name} has joined {self._wish.host}:{self._wish.port}")
        try:
            while True:
                match await channel.expect(Start, End, Over, Turned):
                    case Start(spec):
                        await self._start(spec, channel)
                    case End():
                        self._ask_agent_to_end()
                    case Over() as over:
                        return Over(well=True) if self._is_leaving else over, _AGAIN_S
                    case Turned(why, again):
                        if not again:
                            raise ConfigError(
                                f"home turns {self._wish.name} away", where="join", why=why
                            )
                        _say(f"{why}; this node tries again")
                        return Over(well=True, again=True), _NOT_NEEDED_S
        except ConfigError:
            raise
        except GcoreError as error:
            again = not self._is_leaving
            return Over(well=False, again=again, why=f"home is gone: {error}"), _AGAIN_S
        finally:
            self._channel = None
            await self._end_agent()
            await channel.close()

    # -- the agent ---------------------------------------------------------------------------------

    async def _start(self, spec: bytes, channel: Channel) -> None:
        """Starts the agent. What it writes, and its end, are told to home."""
        reading, writing = os.pipe()
        try:
            decoded = msgspec.msgpack.decode(spec, type=MachineAgentSpec)
            _say(f"starting {decoded.name}")
            # The path stands for the pipe, so that the agent's output comes here.
            log_file = f"/proc/self/fd/{writing}"
            self._agent = await spawn_over_input(list(_AGENT), decoded, log_file)
        finally:
            os.close(writing)
        self._tasks.append(asyncio.ensure_future(self._tell(self._agent, reading, channel)))

    async def _tell(
        self, agent: asyncio.subprocess.Process, reading: int, channel: Channel
    ) -> None:
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        with open(reading, "rb", buffering=0) as file:
            transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), file
            )
            ended = asyncio.ensure_future(agent.wait())
            try:
                # Also what the agent leaves behind may hold the pipe open.
                while content := await _read(stream, ended):
                    if not channel.is_full:  # the agent must not wait for a home that is cut off
                        channel.send(Output(content))
                channel.send(Ended(await ended))
            finally:
                ended.cancel()
                transport.close()

    def _ask_agent_to_end(self) -> None:
        if self._agent is not None and self._agent.stdin is not None:
            self._agent.stdin.close()

    async def _end_agent(self) -> None:
        """Has the agent end with all that it has started; kills it when that takes too long."""
        agent = self._agent
        if agent is None:
            return
        self._ask_agent_to_end()
        try:
            async with asyncio.timeout(_AGENT_ENDS_S):
                await agent.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            await agent.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._agent = None


async def _read(stream: asyncio.StreamReader, ended: asyncio.Future[int]) -> bytes:
    """Returns what comes next; empty when all is read, or when the agent has ended."""
    reading = asyncio.ensure_future(stream.read(_READ_BYTES))
    waited: list[asyncio.Future[Any]] = [reading, ended]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not reading.done():
        await asyncio.wait([reading], timeout=_AGAIN_S)  # what it wrote last
    if reading.done():
        return reading.result()
    reading.cancel()
    return b""


def _ended_badly(over: Over) -> WorkerError:
    return WorkerError(
        "the run ended with an error",
        where="join",
        why=over.why,
        todo="the run's own output says more, on the machine of g-core run",
    )


def _say(line: str) -> None:
    print(f"g-core nodes join: {line}", file=sys.stderr, flush=True)


# -- the command -----------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    """Runs ``g-core nodes join`` with these command-line arguments; returns the exit code."""
    wish = _wish(_parser().parse_args(words))
    return asyncio.run(_until_told(wish))


async def _until_told(wish: Wish) -> int:
    """Returns 0, or the exit code of the signal that ended it. Raises as ``Member.run`` does."""
    loop = asyncio.get_running_loop()
    member = Member(wish)
    running = asyncio.ensure_future(member.run())
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        is_first = received.count(number) == 1
        if number != signal.SIGTERM or not is_first or not member.leave():
            running.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        await running
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[-1]
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="g-core nodes join",
        description="Joins the run that waits at an address, with all that this node has. "
        "It ends with the run, or at the run's next checkpoint when it gets SIGTERM.",
        epilog="exit codes: 0 the run ended well or goes on without this node, 2 it is refused, "
        "5 the run ended with an error or was lost, 7 nobody to join was found\n\n"
        "example:\n  g-core nodes join node1:29399 --token-file ~/.g-core-token",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="HOST:PORT", help="where g-core run waits for nodes")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"holds the token of the run; default: the environment variable {TOKEN_VARIABLE}",
    )
    parser.add_argument(
        "--name", default="", help="of this node; default: slurm's name for it, else the host's"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for how long home is looked for; default: 600",
    )
    parser.add_argument(
        "--again",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for how long it is looked for when it was lost, as it may come back; default: 60",
    )
    return parser


def _wish(args: argparse.Namespace) -> Wish:
    """Reads the arguments. Raises ConfigError."""
    host, _, port = args.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"{args.address!r} is no address",
            where="g-core nodes join",
            todo="write HOST:PORT, such as node1:29399; the port is launcher.config.join_port",
        )
    return Wish(
        host=host,
        port=int(port),
        token=read_token(args.token_file, TOKEN_VARIABLE, "g-core nodes join --token-file"),
        name=args.name or os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        wait_s=args.wait,
        again_s=args.again,
    )
