"""Opens sites on several machines: one node agent on each, joined by TLS.

A launcher derives from ``MachinesLauncher`` and says which machines there are (``hosts``) and how
an agent is started on one (``start``). Addresses, TLS, leases, stores and closing are done for it.

    facts       each machine says what it has, before a process of the run is there
    placement   the core's matter
    agents      started all at once, with the run's secret and its certificate
    leases      held over the network, until the site closes
    closing     the end of what each agent was started with, which ends the agent

How machines are found and how an agent is started on one differs between launchers; a subclass of
``MachinesLauncher`` says it. All else is here. The machine that this runs on, *home*, always has an
agent too: one without devices where it is not among the machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gcore_core import __version__
from gcore_core.contract.errors import AddressError, ConfigError, GcoreError, WorkerError
from gcore_core.contract.launching import ALIVE, NodeFacts, Peer, Servable, Site, SiteNode
from gcore_core.contract.placement import Device
from gcore_core.kits.launching import (
    Nothing,
    RpcNetwork,
    StoreSpec,
    allow_open_files,
    end_hung,
)
from gcore_core.kits.processes import RECORD, clear_up
from gcore_nodes.addresses import (
    Addresses,
    address_towards,
    assign,
    lies_in,
    own_address,
)
from gcore_nodes.agent import MachineAgentSpec, split_patience
from gcore_nodes.facts import MachineFacts, machine_facts, machine_identity
from gcore_nodes.identity import make_identity
from gcore_nodes.joined_disks import JoinedDisks
from gcore_nodes.machines_config import MachinesConfig
from gcore_nodes.messages import HOLD_LEASE, LEAVING, HoldLease
from gcore_nodes.spawn_over_input import spawn_over_input

log = logging.getLogger(__name__)
#: What prints a machine's facts, behind an interpreter.
FACTS = ("-m", "gcore_nodes.facts")
#: What starts an agent, behind an interpreter; it reads its spec from standard input.
AGENT = ("-m", "gcore_nodes.agent")
_ENDS_S = 15.0  # agents have so long to end their workers and themselves
_HUNG_ENDS_S = 5.0  # the same for one that does not answer
_AGAIN_S = 0.5  # between two tries to hold a lease
_TAIL_BYTES = 4096
_TAIL_LINES = 3  # of what a command wrote, shown when it fails
_FACTS_LIMIT_BYTES = 1 << 20
_NOT_FOUND = 127  # what a shell, ssh and env answer for a command that is not there


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine that a launcher has found.

    name: by which a person knows it, and by which the launcher finds it again. Where it is a name
        or an address of the network, others reach the machine there.
    facts: what it says of itself.
    slots: how many of its devices the run may use; None: ``MachinesConfig.devices`` says it.
    number: its place among all machines that the run names, which makes the name of its agent;
        None: its place among those that were found.
    """

    name: str
    facts: MachineFacts
    slots: int | None = None
    number: int | None = None


class StartedAgent(Protocol):
    """Holds what an agent was started with, which may be a command that leads to its machine.

    command: shown to a person when the agent does not come up.
    returncode: how it ended; None: it has not.
    """

    command: str

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> Any:
        """Waits until it has ended."""

    def close(self) -> None:
        """Ends the agent's standard input, and so the agent with all that it has started."""

    async def kill(self) -> None:
        """Ends by force what is on this machine, and waits for its end."""


class AgentCommand:
    """An agent that was started through a command on this machine."""

    def __init__(self, process: asyncio.subprocess.Process, words: Sequence[str]) -> None:
        self.process = process
        self.command = shlex.join(words)

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    async def wait(self) -> int:
        return await self.process.wait()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def kill(self) -> None:
        await end_command(self.process)


async def start_by_command(words: Sequence[str], spec: MachineAgentSpec, log: Path) -> AgentCommand:
    """Starts an agent through a command, which may lead to another machine.

    Raises ConfigError when the command cannot be started.
    """
    try:
        process = await spawn_over_input(list(words), spec, log)
    except OSError as error:
        raise ConfigError(
            f"{words[0]} cannot be started: {error.strerror}",
            where="launcher.config.command",
            todo="install it, or write its whole path",
        ) from error
    return AgentCommand(process, words)


async def end_command(process: asyncio.subprocess.Process) -> None:
    """Kills a command with all that it has started on this machine, and waits for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine of the run.

    name: of its agent.
    host: as the launcher calls it; "" for home where it is not among the hosts.
    address: by which others reach it.
    devices: those that the run may use.
    is_home: the supervisor runs there.
    """

    name: str
    host: str
    facts: MachineFacts
    address: str
    devices: tuple[Device, ...]
    is_home: bool

    def __str__(self) -> str:
        return self.host or "this machine"


@dataclass(frozen=True)
class _Agent:
    """A node agent that was started.

    log: what it writes, on this machine.
    """

    node: Machine
    spec: MachineAgentSpec
    started: StartedAgent
    log: Path


class MachinesLauncher(ABC):
    """Starts one node agent on each machine and joins them; a subclass finds the machines."""

    def __init__(self, config: MachinesConfig, python: str = sys.executable) -> None:
        """python: the interpreter of the agent on home."""
        self._config = config
        self._python = python

    @abstractmethod
    def hosts(self) -> AbstractAsyncContextManager[list[Host]]:
        """Finds the machines of the run, in order.

        What leads to them is held until this is left. It is entered for ``nodes`` and again for
        each site, where agents are started before it is left. Two machines must differ. Raises
        ConfigError, naming the machine, where one cannot be used.
        """

    @abstractmethod
    async def start(self, host: str, spec: MachineAgentSpec, log: Path) -> StartedAgent:
        """Starts the agent of another machine than this one.

        It gets its spec by standard input, whose end is its lifeline (``agent --stdin``).

        host: name of the machine.
        spec: has the run's secret. It must not be in an argument, the environment, a file or a log.
        log: a file on this machine, to which what the agent writes is appended.
        """

    @property
    def grows(self) -> bool:
        """Whether the machines of a run may be others at its next site.

        A subclass that overrides ``newcomer`` and ``let_go`` overrides this, too.
        """
        return False

    async def newcomer(self, present: Sequence[Host]) -> str:
        """Waits for a machine that the next site may use and the open one does not have.

        It is called where the launcher ``grows``, and may wait for ever. Returns its name. Raises
        nothing that waiting mends.

        present: the machines that the site has.
        """
        await asyncio.Event().wait()
        raise AssertionError("this launcher finds no newcomers")

    def let_go(self, host: str) -> None:
        """Is told that a machine leaves the run on purpose: the next site is to be without it."""

    async def start_home(self, spec: MachineAgentSpec, log: Path) -> AgentCommand:
        """Starts the agent of this machine, as a child of this process."""
        return await start_by_command((self._python, *AGENT), spec, log)

    async def nodes(self, devices: int | str) -> list[NodeFacts]:
        async with self.hosts() as hosts:
            return self.node_facts(hosts, devices)

    def node_facts(
        self, hosts: Sequence[Host], devices: int | str, *, at_most: bool = False
    ) -> list[NodeFacts]:
        """Returns what ``nodes`` says of these machines. Raises ConfigError.

        hosts: at least one.
        at_most: fewer devices than are asked for will do.
        """
        nodes = self._machines(hosts)
        return [
            NodeFacts(
                name=node.name,
                devices=dealt,
                host=node.host,
                is_private=lies_in(node.address, self._config.private),
            )
            for node, dealt in zip(nodes, _deal(nodes, devices, at_most=at_most), strict=True)
        ]

    def site(
        self, where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AbstractAsyncContextManager[Site]:
        return self._found_and_opened(where, supervisor, logs)

    @contextlib.asynccontextmanager
    async def _found_and_opened(
        self, where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AsyncIterator[Site]:
        async with self.hosts() as hosts, self._opened(hosts, where, supervisor, logs) as site:
            yield site

    @contextlib.asynccontextmanager
    async def _opened(
        self, hosts: Sequence[Host], where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AsyncIterator[Site]:
        """Opens a site on these hosts, and closes it at the end of the block.

        Closing lets the leases go, ends the supervisor's connections, and then every agent by the
        end of its standard input. What home's agent leaves is removed here; an agent of another
        machine removes its own store and directory.
        """
        nodes = self._machines(hosts)
        home = next(node for node in nodes if node.is_home)
        allow_open_files(len(where) + len(nodes) + 1)
        with self._home_directory() as directory:
            meetings = {node.name: self._meeting(node, directory) for node in nodes}
            places = {node.name: (node.address, meetings[node.name]) for node in nodes}
            homes = {supervisor.name: home.name, **where}
            port, private = self._config.port, self._config.private
            addresses = assign(places, homes, port, private)
            secret = secrets.token_bytes(32)
            identity = make_identity() if addresses.public else b""
            network = RpcNetwork(
                addresses.views[home.name],
                secret,
                self._config.start_s,
                identity=identity,
                public=_only(addresses.public, supervisor.name),
                silence_s=split_patience(self._config.patience_s)[0],
            )
            specs = [
                self._spec(node, meetings[node.name], addresses, secret, identity, logs.absolute())
                for node in nodes
            ]
            agents: list[_Agent] = []
            holding: list[asyncio.Task[None]] = []
            try:
                # What a run left in this directory whose supervisor and agent were both lost.
                await asyncio.to_thread(clear_up, logs / RECORD)
                await network.serve(supervisor.name, supervisor)
                await self._start(nodes, specs, network, logs, agents, holding)
                peers = {agent.node.name: network.peer(agent.node.name) for agent in agents}
                site = Site(
                    network=network,
                    secret=secret,
                    home=home.name,
                    nodes={agent.node.name: self._site_node(agent, network) for agent in agents},
                    where=dict(where),
                    views=addresses.views,
                    public=addresses.public,
                    meeting_addresses=addresses.meeting,
                    identity=identity,
                    files=JoinedDisks(peers, home.name, where),
                    newcomer=partial(self.newcomer, hosts) if self.grows else None,
                )
                yield site
            finally:
                for task in holding:
                    task.cancel()
                await asyncio.gather(*holding, return_exceptions=True)
                await network.close()
                await asyncio.gather(*(_end(agent, _ENDS_S) for agent in agents))
                await asyncio.to_thread(clear_up, logs / RECORD)  # where home's did not end well
                for spec in specs:
                    if not spec.is_remote:
                        shutil.rmtree(spec.store.directory, ignore_errors=True)
                        shutil.rmtree(spec.store.spill, ignore_errors=True)

    # -- which machines there are ------------------------------------------------------------------

    def _machines(self, hosts: Sequence[Host]) -> list[Machine]:
        """Returns the machines of the run; home is the last where it is not a host.

        Raises ConfigError.
        """
        config = self._config
        here = machine_identity()
        nodes = [
            Machine(
                name=f"agent.{index if host.number is None else host.number}",
                host=host.name,
                facts=host.facts,
                address=own_address(host.name, host.facts, config.address),
                devices=_devices(host, config.devices),
                is_home=host.facts.machine == here,
            )
            for index, host in enumerate(hosts)
        ]
        if not any(node.is_home for node in nodes):
            home = Machine(
                name=f"agent.{1 + max(int(node.name.rpartition('.')[2]) for node in nodes)}",
                host="",
                facts=machine_facts(),
                address=address_towards(nodes[0].address, config.port),
                devices=(),
                is_home=True,
            )
            nodes.append(home)
        return nodes

    # -- agents ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _home_directory(self) -> Iterator[str]:
        """Makes the private directory for sockets of this machine, and removes it."""
        try:
            directory = tempfile.mkdtemp(prefix="g-core-", dir=self._config.socket_dir)
        except OSError as error:
            raise AddressError(
                f"no directory for the run's sockets can be made: {error.strerror}",
                where=f"launcher.config.socket_dir: {self._config.socket_dir}",
                todo="name a directory that exists on every host, and that you may write to",
            ) from error
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _meeting(self, node: Machine, home_directory: str) -> str:
        """Returns the directory for sockets on a node. Names differ, as hosts may share files."""
        if node.is_home:
            return home_directory
        parent = Path(self._config.socket_dir or node.facts.temporary)
        return str(parent / f"{Path(home_directory).name}-{node.name.rpartition('.')[2]}")

    def _spec(
        self,
        node: Machine,
        meeting: str,
        addresses: Addresses,
        secret: bytes,
        identity: bytes,
        logs: Path,
    ) -> MachineAgentSpec:
        config = self._config
        directory = Path(meeting).name
        silence_s, lease_s = split_patience(config.patience_s)
        budget = (
            node.facts.free_bytes // 2
            if config.store_gib is None
            else int(config.store_gib * 2**30)
        )
        return MachineAgentSpec(
            name=node.name,
            addresses=addresses.views[node.name],
            public=addresses.public.get(node.name, ""),
            bulk=addresses.bulk,
            secret=secret,
            identity=identity,
            store=StoreSpec(
                node=node.name,
                directory=str(Path(node.facts.memory) / directory),
                spill=str(Path(config.spill_dir or logs.parent) / f"spill-{directory}"),
                budget_bytes=budget,
                patience_s=config.spill_after_s,
            ),
            meeting=meeting,
            record=str(logs / (RECORD if node.is_home else f"processes.{node.name}.json")),
            is_remote=not node.is_home,
            silence_s=silence_s,
            lease_s=0.0 if node.is_home else lease_s,
            start_s=config.start_s,
            directory=os.getcwd(),
            leave_s=config.leave_s if self.grows and not node.is_home else 0.0,
        )

    async def _start(
        self,
        nodes: Sequence[Machine],
        specs: Sequence[MachineAgentSpec],
        network: RpcNetwork,
        logs: Path,
        agents: list[_Agent],
        holding: list[asyncio.Task[None]],
    ) -> None:
        """Starts all agents at once, and holds the leases of those on other machines.

        agents, holding: what was started is added here, also when some fail.
        Raises the error of the first host whose agent does not start.
        """

        async def start_one(node: Machine, spec: MachineAgentSpec) -> None:
            log = logs / f"{node.name}.log"
            if node.is_home:
                started: StartedAgent = await self.start_home(spec, log)
            else:
                started = await self.start(node.host, spec, log)
            agent = _Agent(node, spec, started, log)
            agents.append(agent)
            await self._up(agent, network.peer(node.name), holding)

        parts = (start_one(node, spec) for node, spec in zip(nodes, specs, strict=True))
        results = await asyncio.gather(*parts, return_exceptions=True)
        for error in results:
            if error is not None:
                raise error
        agents.sort(key=lambda agent: nodes.index(agent.node))

    def _site_node(self, agent: _Agent, network: RpcNetwork) -> SiteNode:
        may_leave = self.grows and not agent.node.is_home
        peer = network.peer(agent.node.name)
        return SiteNode(
            agent=peer,
            store=Path(agent.spec.store.directory),
            meeting=Path(agent.spec.meeting),
            end_agent=partial(_end_hung, agent),
            asks_to_leave=partial(_asked_to_leave, peer) if may_leave else None,
            let_go=partial(self.let_go, agent.node.host) if may_leave else None,
        )

    async def _up(self, agent: _Agent, peer: Peer, holding: list[asyncio.Task[None]]) -> None:
        """Waits until an agent answers. Raises WorkerError when it ends, or does not answer."""
        answer: asyncio.Future[Any]
        if agent.node.is_home:
            answer = asyncio.ensure_future(peer.call(ALIVE, None, deadline_s=self._config.start_s))
        else:
            answer = asyncio.get_running_loop().create_future()
            holding.append(asyncio.ensure_future(_hold_lease(peer, answer)))
        ended = asyncio.ensure_future(agent.started.wait())
        waited: list[asyncio.Future[Any]] = [answer, ended]
        try:
            await asyncio.wait(
                waited,
                timeout=self._config.start_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answer.done() and answer.exception() is None:
                return
            raise self._not_up(agent, answer)
        finally:
            answer.cancel()
            ended.cancel()

    def _not_up(self, agent: _Agent, answer: asyncio.Future[Any]) -> WorkerError:
        code = agent.started.returncode
        tail = _tail(agent.log)
        if code is not None:
            return WorkerError(
                f"its node agent ended with {code} before it was up",
                where=str(agent.node),
                why=tail or "it wrote nothing",
                todo=f"its log: {agent.log}; its command: {agent.started.command}",
            )
        cause = answer.exception() if answer.done() else None
        ports = f"{self._config.port} and those after it"
        return WorkerError(
            f"its node agent is started, and does not answer at {agent.spec.public}",
            where=str(agent.node),
            why=f"{cause}".splitlines()[-1] if cause else tail.rpartition("\n")[2],
            todo=f"let the hosts reach each other at ports {ports}; its log: {agent.log}",
        )


async def _hold_lease(agent: Peer, is_held: asyncio.Future[Any]) -> None:
    """Holds an agent's lease until cancelled.

    One that is lost, or cannot be had, is asked for again, over another connection.

    is_held: set as soon as the lease is held.
    """
    while True:
        with contextlib.suppress(GcoreError):
            async for _ in agent.stream(HOLD_LEASE, HoldLease(os.getpid())):
                if not is_held.done():
                    is_held.set_result(True)
        await asyncio.sleep(_AGAIN_S)


async def _asked_to_leave(agent: Peer) -> None:
    """Waits until an agent asks to leave. Raises WorkerDied when it is lost."""
    async for _ in agent.stream(LEAVING, Nothing()):
        return


async def _end_hung(agent: _Agent) -> None:
    """Ends an agent that does not answer.

    One on another machine cannot be reached by a signal. It sees the end of its standard input, or
    its kernel wakes it then; else its lease runs out.
    """
    if agent.node.is_home:
        assert isinstance(agent.started, AgentCommand)
        await end_hung(agent.started.process)
    else:
        await _end(agent, _HUNG_ENDS_S)


async def _end(agent: _Agent, within_s: float) -> None:
    """Has an agent end, and its command with it; kills the command when that takes too long."""
    agent.started.close()
    try:
        await asyncio.wait_for(agent.started.wait(), within_s)
    except TimeoutError:
        await agent.started.kill()


# -- facts -----------------------------------------------------------------------------------------


def read_facts(code: int, out: bytes, err: bytes) -> MachineFacts | str:
    """Reads what a machine has answered to ``FACTS``.

    Returns its facts, or else what is wrong with the machine.

    code: how the command ended.
    out, err: what it has written. A login may print lines before the facts.
    """
    if code:
        return _failure(code, _shown(err))
    lines = out[-_FACTS_LIMIT_BYTES:].splitlines()
    try:
        facts = msgspec.json.decode(lines[-1] if lines else b"", type=MachineFacts)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, IndexError):
            fields = msgspec.json.decode(lines[-1], type=dict)
        version = fields.get("version")
        if version is not None and version != __version__:
            return _other_version(version, f"{fields.get('executable')}")
        shown = _shown(out) or _shown(err) or "nothing"
        return f"it did not answer with its facts but with: {shown}"
    if facts.version != __version__:
        return _other_version(facts.version, facts.executable)
    return facts


def _failure(code: int, tail: str) -> str:
    """Says how a command ended, with the last lines of what it wrote."""
    if code == _NOT_FOUND:
        tail += "\nthe interpreter is not there: set launcher.config.python"
    elif "No module named" in tail:
        missing = "gcore-core" if "named gcore_core" in tail.replace("'", "") else "gcore-nodes"
        tail += f"\nthat interpreter has no {missing}: install it there"
    return f"the command ended with {code}: {tail}" if tail else f"the command ended with {code}"


def _other_version(version: str, executable: str) -> str:
    return f"it has gcore-core {version} ({executable}), here it is {__version__}"


def _shown(output: bytes) -> str:
    lines = (line for line in output.decode("utf-8", "replace").splitlines() if line.strip())
    return "\n".join(deque(lines, maxlen=_TAIL_LINES))


# -- devices ---------------------------------------------------------------------------------------


def _devices(host: Host, devices: int | None) -> tuple[Device, ...]:
    """Returns the devices of a host that the run may use. Raises ConfigError for too many.

    A host without GPUs may have more devices than cores: each is a process then.
    """
    wish = devices if host.slots is None else host.slots
    found = host.facts.devices
    if wish is None:
        return tuple(Device(index=device.index, kind=device.kind) for device in found)
    kind = found[0].kind if found else "cpu"
    if kind != "cpu" and wish > len(found):
        raise ConfigError(
            f"{host.name} is to use {wish} devices, and it has {len(found)}",
            where="launcher.config",
            todo="lower launcher.config.devices, or the host's slots",
        )
    return tuple(Device(index=index, kind=kind) for index in range(wish))


def _deal(
    nodes: Sequence[Machine], devices: int | str, *, at_most: bool
) -> list[tuple[Device, ...]]:
    """Returns the devices of each node that the run uses, those of the first hosts first.

    devices: how many in all; "auto": all.
    at_most: fewer will do. Otherwise ConfigError is raised when there are fewer.
    """
    if str(devices) == "auto":
        return [node.devices for node in nodes]
    missing = int(devices)
    dealt = []
    for node in nodes:
        dealt.append(node.devices[:missing])
        missing -= len(dealt[-1])
    if missing and not at_most:
        listed = ", ".join(f"{node} has {len(node.devices)}" for node in nodes)
        raise ConfigError(
            f"the run is to have {devices} devices, and its hosts have {int(devices) - missing}",
            where="cluster.devices",
            why=listed,
            todo="lower it, name more hosts, or set launcher.config.devices where they have no GPU",
        )
    return dealt


def _only(addresses: Mapping[str, str], name: str) -> dict[str, str]:
    return {name: addresses[name]} if name in addresses else {}


def _tail(log: Path) -> str:
    """Returns the last lines of a log."""
    try:
        return _shown(log.read_bytes()[-_TAIL_BYTES:])
    except OSError:
        return ""
