"""Takes machines into a site of several machines that is open: the launcher's side.

    next       the launcher finds a machine; it says what it has
    take_in    addresses for it and its processes, an agent, a lease
    let_go     what runs there is ended, its addresses are taken back
    closing    the site ends its agent as it ends the others

A newcomer that was taken in is a machine like the others. The supervisor tells its addresses to
those that speak with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gcore_core.contract.errors import ConfigError, GcoreError
from gcore_core.contract.launching import NodeFacts, Site, SiteNode
from gcore_core.runtime.process.addresses import Addresses, add_node, remove_node
from gcore_core.runtime.rpc.sockets import RpcNetwork


class NewMachine(Protocol):
    """What is known of a machine that has come, see ``machines.Machine``."""

    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def address(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Is a machine that has come, before it is taken in.

    machine: what is known of it.
    facts: what the supervisor is told of it.
    meeting: the directory for sockets there.
    start: starts an agent there, and waits until it answers. The site's addresses must have the
        node by then.
    """

    machine: NewMachine
    facts: NodeFacts
    meeting: str
    start: Callable[[], Awaitable[SiteNode]]


@dataclass(kw_only=True)
class SiteNewcomers:
    """Is the ``Newcomers`` of a site.

    site: the open one.
    addresses: of its processes; the site shares the mappings.
    network: the supervisor's.
    port: as in ``add_node``.
    find: waits for the next machine that the site has not.
    refuse: tells a machine that it is not taken, given its host and why.
    """

    site: Site
    addresses: Addresses
    network: RpcNetwork
    port: int
    find: Callable[[], Awaitable[Arrival]]
    refuse: Callable[[str, str], Awaitable[None]]
    _come: Arrival | None = None  # the latest
    _processes: list[str] = field(default_factory=list)  # of the latest, once it is taken in

    async def next(self) -> NodeFacts:
        self._come = await self.find()
        self._processes = []
        return self._come.facts

    async def take_in(self, node: str, processes: Sequence[str]) -> None:
        arrival = self._newcomer(node)
        address = arrival.machine.address
        place = (address, arrival.meeting)
        add_node(self.addresses, node, place, processes, self.port)
        self._processes = list(processes)
        self.site.where.update(dict.fromkeys(processes, node))
        self.network.introduce(self.addresses.views[self.site.home])
        try:
            self.site.nodes[node] = await arrival.start()
        except GcoreError:
            self._forget(node)
            raise

    async def let_go(self, node: str, why: str) -> None:
        arrival = self._newcomer(node)
        there = self.site.nodes.get(node)
        self._forget(node)
        if there is not None and there.end_agent is not None:
            await there.end_agent()
        await self.refuse(arrival.machine.host, why)
        self._come = None

    def _newcomer(self, node: str) -> Arrival:
        if self._come is None or self._come.facts.name != node:
            raise ConfigError("it is no newcomer", where=node)
        return self._come

    def _forget(self, node: str) -> None:
        self.site.nodes.pop(node, None)
        for process in self._processes:
            self.site.where.pop(process, None)
        remove_node(self.addresses, node, self._processes)
        self._processes = []
