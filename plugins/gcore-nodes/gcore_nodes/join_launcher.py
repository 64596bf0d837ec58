"""The launcher ``nodes/join``: nodes start themselves, and join the run at home's port.

    nodes     g-core nodes join HOME:29399      the same command on each, before or after g-core run
    home      waits until all have joined, and says who is missing
    agents    each node starts its own, with what home tells it over the connection that it made
    closing   each node is told how the run ended, and its command ends so

Nothing leads to a node: it connects, so it needs no server, no key of a user and no name. A token
that all know lets it in (``channel``). Its connection is its agent's lifeline.

Nodes are asked twice: when they are counted, and when the site opens. In between they come again,
since a launcher may be used for one of these alone, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

from gcore_core.contract.errors import ConfigError, WorkerError
from gcore_core.contract.launching import FoundNodes, Servable, Site
from gcore_nodes.agent import MachineAgentSpec
from gcore_nodes.channel import Over
from gcore_nodes.config import JoinConfig
from gcore_nodes.door import Door, JoinedNode
from gcore_nodes.facts import MachineFacts, machine_facts, machine_identity
from gcore_nodes.hosts import find_hosts
from gcore_nodes.machines import Host, MachinesLauncher, StartedAgent
from gcore_nodes.token import read_token


class JoinLauncher(MachinesLauncher):
    """Waits for nodes that start themselves; see ``JoinConfig``."""

    def __init__(self, config: JoinConfig) -> None:
        super().__init__(config)
        self._join = config
        self._nodes: dict[str, JoinedNode] = {}  # those of the door that is open
        self._hosts: list[Host] = []
        self._opens_site = False
        self._counted: list[str] = []  # names of the nodes that ``find_nodes`` found
        self._most: list[str] = []  # likewise, when it found most
        self._door: Door | None = None  # the one that is open

    async def find_nodes(self, devices: int | str, *, again: bool) -> FoundNodes:
        """See ``ElasticLauncher``. Fewer nodes than the job wants will do where ``min_hosts`` says
        so.
        """
        self._counted = []
        wanted, _ = _wanted(self._join)
        names = [] if isinstance(wanted, int) else wanted
        n_wanted = wanted if isinstance(wanted, int) else len(wanted)
        grows = self.grows
        async with self.hosts() as hosts:
            nodes = self.node_facts(hosts, devices, at_most=grows)
            found = [host.name for host in hosts]
        if len(found) >= len(self._most):
            self._most = found
        n_missing = n_wanted - len(found) if grows else 0
        absent = [name for name in names or self._most if name not in found][:n_missing]
        missing = dict.fromkeys(absent, "it has not joined")
        if grows:
            self._counted = found
        return FoundNodes(nodes=nodes, missing=missing, may_grow=grows)

    @property
    def grows(self) -> bool:
        return self._join.min_hosts is not None

    async def newcomer(self, present: Sequence[Host]) -> str:
        assert self._door is not None
        return await self._door.newcomer()

    def let_go(self, host: str) -> None:
        """Has the command of a node end well when the site is closed. It may be started again."""
        assert self._door is not None
        self._door.let_go(host)

    @contextlib.asynccontextmanager
    async def hosts(self) -> AsyncIterator[list[Host]]:
        if self._nodes:  # its site is open
            yield self._hosts
            return
        config = self._join
        token = read_token(config.token_file, config.token_variable, "launcher.config.token_file")
        wanted, slots = _wanted(config)
        is_counting = not self._opens_site
        most = 0
        later_names = None if isinstance(wanted, int) else wanted
        least = config.min_hosts
        if self._counted and not is_counting:
            most = wanted if isinstance(wanted, int) else len(wanted)
            wanted = self._counted
            least = None
        door = Door(
            token,
            wanted,
            address=listening_address(config, machine_facts()),
            port=config.join_port,
            silence_s=config.patience_s / 2,
            most=most,
            later_names=later_names,
        )
        self._door = door
        over = Over(well=True, again=is_counting)
        await door.open()
        try:
            joined = await self._gathered(door, least)
            self._nodes = {node.name: node for node in joined}
            self._hosts = _hosts(joined, slots, has_network=config.address is not None)
            yield self._hosts
        except BaseException as error:
            if not is_counting:
                over = _failed(error)
            raise
        finally:
            self._nodes = {}
            self._door = None
            await door.close(over)

    async def _gathered(self, door: Door, least: int | None) -> list[JoinedNode]:
        """Waits for the nodes. One that was counted and does not come again is a lost machine.

        Raises WorkerError for that, so that a run that goes on is placed anew, without it.
        """
        try:
            return await door.gather(self._join.wait_s, least)
        except ConfigError as error:
            if self._counted and self._opens_site:
                raise WorkerError(
                    "a machine on which the run was placed has not come again",
                    where=error.where,
                    why=error.why,
                    todo=error.todo,
                ) from error
            raise

    @contextlib.asynccontextmanager
    async def site(
        self, where: Mapping[str, str], supervisor: Servable, logs: Path
    ) -> AsyncIterator[Site]:
        self._opens_site = True
        try:
            async with super().site(where, supervisor, logs) as site:
                yield site
        finally:
            self._opens_site = False

    async def start(self, host: str, spec: MachineAgentSpec, log: Path) -> StartedAgent:
        node = self._nodes[host]
        node.start(spec, log)
        return node


def _failed(error: BaseException) -> Over:
    """Says to the nodes how a run ended that did not end well.

    After an error in a process the run may go on from a checkpoint, at a new site.
    """
    if isinstance(error, asyncio.CancelledError):
        return Over(well=False, why="it was stopped")
    return Over(well=False, again=isinstance(error, WorkerError), why=str(error) or repr(error))


def _wanted(config: JoinConfig) -> tuple[int | list[str], dict[str, int | None]]:
    """Returns how many nodes join or their names, and the devices that a file gives them."""
    if isinstance(config.hosts, int):
        return config.hosts, {}
    hosts = find_hosts(config.hosts)
    return [host.name for host in hosts], {host.name: host.slots for host in hosts}


def listening_address(config: JoinConfig, facts: MachineFacts) -> str:
    """Returns the address of this machine at which nodes join. Raises ConfigError.

    It is one, so that nobody on another network of the machine even sees that it listens.
    """
    if config.home is not None:
        return _named(config.home)[0] if _named(config.home) else config.home
    own = facts.addresses
    if config.address is not None:
        network = ipaddress.ip_network(config.address, strict=False)
        own = [address for address in own if ipaddress.ip_address(address) in network]
    if not facts.addresses:
        return "127.0.0.1"  # it has no network, so all nodes are this machine
    if len(own) == 1:
        return own[0]
    for address in _named(facts.host):
        if address in own:
            return address
    raise ConfigError(
        "it is not clear at which address of this machine nodes join",
        where="launcher.config.home",
        why=f"it has {', '.join(facts.addresses)}",
        todo="set it to the one that the nodes reach, and give that to the nodes",
    )


def _named(host: str) -> list[str]:
    """Returns the addresses that a name stands for here; [] where nobody knows."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for _, _, _, _, address in found]


def _hosts(
    joined: Sequence[JoinedNode], slots: Mapping[str, int | None], *, has_network: bool
) -> list[Host]:
    """Returns the machines that have joined, each with the address by which home and it meet."""
    here = machine_identity()
    towards_home = [node.home_address for node in joined if node.facts.machine != here]
    hosts = []
    for node in joined:
        facts = node.facts
        met = towards_home if facts.machine == here else [node.address]
        addresses = [address for address in met if address in facts.addresses][:1]
        if addresses and not has_network:
            facts = msgspec.structs.replace(facts, addresses=addresses)
        hosts.append(Host(name=node.name, facts=facts, slots=slots.get(node.name)))
    return hosts
