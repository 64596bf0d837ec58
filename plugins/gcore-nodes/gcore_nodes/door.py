"""Lets nodes into a run that know its token: what ``nodes/join`` does at home.

Door.open            a certificate of its own, and a port
Door.gather          waits until all nodes have joined, and says who is missing
JoinedNode.start     has a node start its agent, and writes what the agent writes to a log
Door.close           tells every node how the run ended
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gcore_core import __version__
from gcore_core.contract.errors import AddressError, ConfigError, GcoreError
from gcore_core.kits.wire import certificate_of
from gcore_nodes.agent import MachineAgentSpec
from gcore_nodes.channel import (
    Channel,
    End,
    Ended,
    Joining,
    Message,
    Output,
    Over,
    Start,
    Turned,
    admit,
    fingerprint,
)
from gcore_nodes.facts import MachineFacts
from gcore_nodes.hosts import natural_order
from gcore_nodes.identity import make_identity, server_context

log = logging.getLogger(__name__)
_PROOF_S = 10.0  # who connects has so long to prove that he knows the token
_STRANGERS = 256  # so many may be about to prove it; further ones are sent away
_FIRST_SAID_S = 2.0  # until it is first said who is missing
_SAID_EVERY_S = 30.0
_SETTLE_S = 3.0  # where fewer nodes will do: no other has joined for so long
_LOST = 255  # exit code of an agent whose node is gone, as ssh has it


class JoinedNode:
    """Is a node that has joined, as home sees it.

    name: under which it joined.
    facts: what its machine has.
    address: from which it has connected.
    home_address: of home, to which it has connected.
    command: what a person has started there.
    returncode: of its agent; None: it has not ended, or is not started.
    """

    def __init__(self, name: str, facts: MachineFacts, channel: Channel) -> None:
        self.name = name
        self.facts = facts
        self.address = channel.peer
        self.home_address = channel.here
        self.command = f"g-core nodes join, on {name}"
        self.returncode: int | None = None
        self._channel = channel
        self._ended = asyncio.Event()
        self._log: Path | None = None

    def start(self, spec: MachineAgentSpec, log_file: Path) -> None:
        """Has the node start its agent."""
        self._log = log_file
        self._log.touch()
        self._channel.send(Start(msgspec.msgpack.encode(spec)))
        if self._ended.is_set():  # it was lost before
            self._end(_LOST)

    def close(self) -> None:
        """Has the node end its agent."""
        self._channel.send(End())

    async def kill(self) -> None:
        """Ends the connection: the node ends its agent then, or its lease runs out."""
        await self._channel.close()
        self._end(_LOST)

    async def wait(self) -> int:
        """Waits until its agent has ended, or the node is gone; returns the exit code."""
        await self._ended.wait()
        return self.returncode or 0

    def tell(self, message: Message) -> None:
        self._channel.send(message)

    async def listen(self) -> None:
        """Takes what the node says, until its connection ends."""
        try:
            while True:
                match await self._channel.expect(Output, Ended):
                    case Output(content):
                        self._write(content)
                    case Ended(code):
                        self._end(code)
        except (GcoreError, OSError) as error:
            self._write(f"home: {error}\n".encode())
        finally:
            self._end(_LOST)

    def _write(self, content: bytes) -> None:
        if self._log is not None:
            with open(self._log, "ab") as file:
                file.write(content)

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
        self._ended.set()


class Door:
    """Waits for the nodes of a run.

    token: which nodes must know.
    wanted: how many nodes join; or their names.
    address, port: of this machine, at which they join.
    silence_s: a node that gives no sign of life for so long is lost.
    say: prints a line for the person who waits.
    most: as many nodes as this may be there at once: those that join after ``gather`` wait for the
        next door, and ``newcomer`` tells of them. 0: none, they are turned away.
    later_names: those that such nodes may have; None: any.
    """

    def __init__(
        self,
        token: bytes,
        wanted: int | Sequence[str],
        *,
        address: str,
        port: int,
        silence_s: float,
        say: Callable[[str], None] | None = None,
        most: int = 0,
        later_names: Sequence[str] | None = None,
    ) -> None:
        self._token = token
        self._n_wanted = wanted if isinstance(wanted, int) else len(wanted)
        self._names = None if isinstance(wanted, int) else list(wanted)
        self._port = port
        self._address = address
        self._silence_s = silence_s
        self._say = say or _print
        self._certificate = b""
        self._nodes: dict[str, JoinedNode] = {}
        self._changed = asyncio.Event()
        self._is_full = False
        self._most = most
        self._later_names = later_names
        self._newcomers = asyncio.Queue[JoinedNode]()
        self._leaving = set[str]()
        self._server: asyncio.Server | None = None
        self._visits = set[asyncio.Task[None]]()
        self._n_strangers = 0
        self._refused = set[str]()  # addresses that were refused, and told of

    async def open(self) -> None:
        """Listens. Raises AddressError when the port is taken."""
        identity = make_identity()
        certificate = certificate_of(identity).decode("ascii")
        self._certificate = fingerprint(ssl.PEM_cert_to_DER_cert(certificate))
        try:
            self._server = await asyncio.start_server(
                self._visited,
                self._address,
                self._port,
                ssl=server_context(identity),
                ssl_handshake_timeout=_PROOF_S,
            )
        except OSError as error:
            raise AddressError(
                f"nodes cannot join at {self._address}:{self._port}: {_reason(error)}",
                where="launcher.config.join_port",
                todo="set it to a free port, and launcher.config.home to this machine's address",
            ) from error

    async def gather(self, wait_s: float, least: int | None = None) -> list[JoinedNode]:
        """Waits until all nodes have joined; returns them in order.

        Their order is that of their names in the job, else the natural one of their names.
        Raises ConfigError when some have not joined after ``wait_s``.

        least: so many will do, when no other has joined for ``_SETTLE_S``; None: all must.
        """
        saying = asyncio.ensure_future(self._say_regularly())
        try:
            async with asyncio.timeout(wait_s):
                while len(self._nodes) < self._n_wanted and not await self._is_settled(least):
                    pass
        except TimeoutError:
            raise ConfigError(
                f"not all nodes have joined within {wait_s:g} s",
                where="launcher.config.hosts",
                why=self._missing(),
                todo="start the join command on every node, or raise launcher.config.wait_s",
            ) from None
        finally:
            saying.cancel()
        self._is_full = True
        order = self._names or natural_order(list(self._nodes))
        return [self._nodes[name] for name in order if name in self._nodes]

    async def _is_settled(self, least: int | None) -> bool:
        """Waits for a change; returns whether none comes and there are enough nodes."""
        is_enough = least is not None and len(self._nodes) >= least
        self._changed.clear()
        try:
            async with asyncio.timeout(_SETTLE_S if is_enough else None):
                await self._changed.wait()
        except TimeoutError:
            return True
        return False

    async def newcomer(self) -> str:
        """Waits for a node that joins after ``gather`` and returns its name."""
        while True:
            node = await self._newcomers.get()
            if self._nodes.get(node.name) is node:
                return node.name

    def let_go(self, name: str) -> None:
        """Has a node be told at the end that all is well, whatever the others are told."""
        self._leaving.add(name)

    async def close(self, over: Over) -> None:
        """Tells all nodes that have joined how it ended, and ends all connections."""
        if self._server is not None:
            self._server.close()
        for node in self._nodes.values():
            node.tell(Over(well=True) if node.name in self._leaving else over)
        for visit in self._visits:
            visit.cancel()
        await asyncio.gather(*self._visits, return_exceptions=True)

    # -- who comes ---------------------------------------------------------------------------------

    async def _visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.current_task()
        assert visit is not None
        self._visits.add(visit)
        channel = Channel(reader, writer)
        try:
            node = await self._let_in(channel)
            if node is not None:
                try:
                    await node.listen()
                finally:
                    self._left(node)
        except asyncio.CancelledError:
            pass  # the door is closed
        finally:
            await channel.close()
            self._visits.discard(visit)

    async def _let_in(self, channel: Channel) -> JoinedNode | None:
        """Returns the node that has joined; None for whoever may not."""
        if self._n_strangers >= _STRANGERS:
            return None
        self._n_strangers += 1
        try:
            async with asyncio.timeout(_PROOF_S):
                if not await admit(channel, self._token, self._certificate, self._silence_s):
                    if channel.peer not in self._refused and len(self._refused) < _STRANGERS:
                        self._refused.add(channel.peer)
                        self._say(f"{channel.peer} is refused: it does not know the token")
                    return None
                joining = await channel.expect(Joining)
        except (GcoreError, OSError, TimeoutError) as error:
            log.info("%s has not joined: %s", channel.peer, error)
            return None
        finally:
            self._n_strangers -= 1
        answer = self._joined(joining, channel)
        if isinstance(answer, JoinedNode):
            return answer
        if not answer.again:
            self._say(f"{joining.name} cannot join: {answer.why}")
        channel.send(answer)
        return None

    def _joined(self, joining: Joining, channel: Channel) -> JoinedNode | Turned:
        """Returns the node, or why it is turned away."""
        if joining.version != __version__:
            here = f"{__version__} ({sys.executable})"
            there = f"{joining.version} ({joining.python})"
            return Turned(f"it has gcore-core {there}, home has {here}", again=False)
        try:
            facts = msgspec.msgpack.decode(joining.facts, type=MachineFacts)
        except msgspec.MsgspecError as error:
            return Turned(f"its facts cannot be read: {error}", again=False)
        name = _known_name(joining.name, self._names)
        later_name = _known_name(joining.name, self._later_names) if self._most else ""
        if not name and not later_name:
            expected = ", ".join(self._later_names or self._names or ())
            return Turned(f"launcher.config.hosts has no {joining.name}: {expected}", again=False)
        if not self._is_full and not name:
            return Turned("the run is starting with others", again=True)
        if self._is_full and len(self._nodes) >= self._most:
            return Turned("all nodes of the run have joined", again=True)
        return self._entered(name or later_name, facts, channel)

    def _entered(self, name: str, facts: MachineFacts, channel: Channel) -> JoinedNode | Turned:
        """Returns a node that may join under a name, or why it may not join now."""
        before = self._nodes.get(name)
        if before is not None and before.facts.machine != facts.machine:
            why = f"another machine ({before.address}) has joined as {name}; set --name"
            return Turned(why, again=False)
        for other in list(self._nodes.values()):
            if other.facts.machine == facts.machine:
                if self._is_full:  # it works for the run; a lost one is soon taken out
                    return Turned("this machine has joined already", again=True)
                other.tell(Turned("this machine has joined again", again=False))
                del self._nodes[other.name]
        if len(self._nodes) >= (self._most if self._is_full else self._n_wanted):
            return Turned("all nodes of the run have joined", again=True)
        node = JoinedNode(name, facts, channel)
        self._nodes[name] = node
        self._changed.set()
        if self._is_full:
            self._newcomers.put_nowait(node)
        return node

    def _left(self, node: JoinedNode) -> None:
        is_kept = self._is_full and not self._most
        if self._nodes.get(node.name) is node and not is_kept:
            del self._nodes[node.name]
            self._say(f"{node.name} has left")
            self._changed.set()

    # -- what is said ------------------------------------------------------------------------------

    async def _say_regularly(self) -> None:
        await asyncio.sleep(_FIRST_SAID_S)
        while True:
            self._say(self._missing())
            await asyncio.sleep(_SAID_EVERY_S)

    def _missing(self) -> str:
        """Says who has joined and who is missing."""
        here = natural_order(list(self._nodes))
        joined = f"{len(here)} of {self._n_wanted} nodes have joined {self._address}:{self._port}"
        listed = f": {_some(here)}" if here else ""
        if self._names is None:
            return joined + listed
        return f"{joined}; missing: {_some([n for n in self._names if n not in self._nodes])}"


def _known_name(name: str, known: Sequence[str] | None) -> str:
    """Returns the name that the job has for a node; "": it has none.

    known: the job's names; None: it takes any.
    """
    if known is None or name in known:
        return name
    short = name.partition(".")[0]
    return short if short in known else ""


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _reason(error: OSError) -> str:
    """Returns what is wrong, without the address, which asyncio puts in front."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def _print(line: str) -> None:
    print(f"nodes/join: {line}", file=sys.stderr, flush=True)
