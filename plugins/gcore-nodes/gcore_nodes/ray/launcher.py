"""The launcher ``ray``: one node agent on each machine that a Ray cluster has for the run.

    facts     keepers, one on each machine, run python -m gcore_nodes.facts
    agents    keepers run python -m gcore_nodes.agent --stdin
    closing   the end of each agent's standard input, then of its keeper

The agent of this machine is a child of this process; its keeper only holds the resources.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.launching import FoundNodes
from gcore_core.kits.launching import input_of
from gcore_nodes.agent import MachineAgentSpec
from gcore_nodes.facts import machine_identity
from gcore_nodes.machines import (
    AGENT,
    AgentCommand,
    Host,
    MachinesLauncher,
    StartedAgent,
    read_facts,
    start_by_command,
)
from gcore_nodes.ray.config import RayConfig
from gcore_nodes.ray.keeper import order
from gcore_nodes.ray.link import COMMAND, Link, linked
from gcore_nodes.ray.messages import KeptNode, Wish
from gcore_nodes.ray.sealing import seal

log = logging.getLogger(__name__)


class RayLauncher(MachinesLauncher):
    """Starts one node agent on each machine of a Ray cluster; see ``RayConfig``."""

    def __init__(self, config: RayConfig, command: Sequence[str] = COMMAND) -> None:
        """command: starts the process that speaks with Ray."""
        super().__init__(config, config.python or sys.executable)
        self._ray = config
        self._command = command
        self._addresses: list[str] = []  # of the nodes that ``find_nodes`` found
        self._most: list[str] = []  # of the nodes that the run had when it had most
        self._link: Link | None = None
        self._visible: str | None = None  # CUDA_VISIBLE_DEVICES that Ray has set on this machine

    async def find_nodes(self, devices: int | str, *, again: bool) -> FoundNodes:
        """See ``ElasticLauncher``. Ray does not tell which of its nodes are missing, so missing are
        those that this run has had, unless others have taken their places.
        """
        self._addresses = []
        least = self._ray.min_nodes or 1
        async with self._found(self._wish(least, self._ray.start_s if again else None)) as hosts:
            nodes = self.node_facts(hosts, devices, at_most=again)
            self._addresses = [host.name for host in hosts]
        if len(self._addresses) >= len(self._most):
            self._most = self._addresses
        n_fewer = len(self._most) - len(self._addresses)
        gone = [address for address in self._most if address not in self._addresses]
        missing = dict.fromkeys(gone[:n_fewer], "Ray no longer has it")
        return FoundNodes(nodes=nodes, missing=missing)

    @contextlib.asynccontextmanager
    async def hosts(self) -> AsyncIterator[list[Host]]:
        wish = msgspec.structs.replace(self._wish(1, None), addresses=self._addresses)
        async with self._found(wish) as hosts:
            yield hosts

    def _wish(self, least: int, settle_s: float | None) -> Wish:
        config = self._ray
        return Wish(
            cluster=config.cluster,
            nodes=config.nodes,
            resources=config.resources,
            wait_s=config.wait_s,
            python=config.python,
            start_s=config.start_s,
            least=least,
            settle_s=settle_s,
        )

    @contextlib.asynccontextmanager
    async def _found(self, wish: Wish) -> AsyncIterator[list[Host]]:
        """Finds the machines of a wish, and holds them."""
        async with linked(wish, _say, self._command) as link:
            hosts = [self._host(node) for node in link.nodes]
            _check_distinct(hosts)
            self._link = link
            try:
                yield hosts
            finally:
                self._link = None

    def _host(self, node: KeptNode) -> Host:
        """Returns the machine of a Ray node. Raises ConfigError when it cannot be used."""
        facts = read_facts(node.code, node.out, node.err)
        if isinstance(facts, str):
            raise ConfigError(
                f"{node.address} cannot be used",
                where="launcher.config",
                why=facts,
                todo="install there, where Ray runs, what is installed here, in the same versions",
            )
        if facts.machine == machine_identity():
            self._visible = node.visible
        # Of a node without GPUs the run takes the CPUs that Ray has set aside for it.
        is_cpu = all(device.kind == "cpu" for device in facts.devices)
        slots = int(node.cpus) if is_cpu and self._ray.devices is None else None
        return Host(name=node.address, facts=facts, slots=slots or None)

    async def start(self, host: str, spec: MachineAgentSpec, log: Path) -> StartedAgent:
        assert self._link is not None
        (node,) = [node for node in self._link.nodes if node.address == host]
        command = [self._ray.python or "", *AGENT, "--stdin"]
        content = order(command, self._ray.environment, input_of(spec))
        return self._link.start(host, seal(content, node.public), log)

    async def start_home(self, spec: MachineAgentSpec, log: Path) -> AgentCommand:
        changed = dict(self._ray.environment)
        if self._visible is not None:
            changed.setdefault("CUDA_VISIBLE_DEVICES", self._visible)
        settings = [f"{name}={value}" for name, value in changed.items()]
        words = ["env", *settings] if settings else []
        return await start_by_command([*words, self._python, *AGENT], spec, log)


def _say(why: str) -> None:
    """Tells a person what the run waits for. There is no display yet."""
    log.warning("the run waits for Ray: %s", why)
    sys.stderr.write(f"the run waits for Ray: {why}\n")
    sys.stderr.flush()


def _check_distinct(hosts: Sequence[Host]) -> None:
    """Raises ConfigError when two Ray nodes are one machine."""
    by_machine: dict[str, str] = {}
    for host in hosts:
        other = by_machine.setdefault(host.facts.machine, host.name)
        if other != host.name:
            raise ConfigError(
                f"{other} and {host.name} are one machine, {host.facts.host}",
                where="launcher.config",
                todo="start Ray once on each machine; an agent uses all of its devices",
            )
