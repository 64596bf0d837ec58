"""The launcher ``shrink/namespaces``: several nodes on this machine, out of namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from pathlib import Path

from gcore_nodes.agent import MachineAgentSpec
from gcore_nodes.facts import MachineFacts
from gcore_nodes.machines import (
    AGENT,
    FACTS,
    Host,
    MachinesLauncher,
    StartedAgent,
    end_command,
    read_facts,
    start_by_command,
)
from gcore_nodes.machines_config import MachinesConfig

from gcore_core.contract.errors import ConfigError
from gcore_tools.shrink.config import NamespacesConfig
from gcore_tools.shrink.namespaces import NodeSpace, free_network, node_spaces


class NamespacesLauncher(MachinesLauncher):
    """Starts one node agent on each node, which is made for the run; see ``NamespacesConfig``."""

    def __init__(self, config: NamespacesConfig) -> None:
        self._network = free_network()
        super().__init__(in_network(config, self._network))
        self._nodes = config.nodes
        self._shm_mib = config.shm_mib
        self._start_s = config.start_s
        self._spaces: Mapping[str, NodeSpace] = {}  # address -> the node, while they are there

    @contextlib.asynccontextmanager
    async def hosts(self) -> AsyncIterator[list[Host]]:
        with contextlib.ExitStack() as stack:
            making = node_spaces(self._nodes, self._network, shm_mib=self._shm_mib)
            nodes = await asyncio.to_thread(stack.enter_context, making)
            self._spaces = {node.address: node for node in nodes}
            facts = await asyncio.gather(*(self._facts(node) for node in nodes))
            yield [
                Host(name=node.address, facts=one) for node, one in zip(nodes, facts, strict=True)
            ]

    async def _facts(self, node: NodeSpace) -> MachineFacts:
        """Asks a node what it has. Raises ConfigError where it does not answer."""
        words = node.command((sys.executable, *FACTS))
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), self._start_s)
        except TimeoutError:
            await end_command(process)
            raise _unusable(node, f"no answer within {self._start_s:g} s") from None
        facts = read_facts(process.returncode or 0, output, errors)
        if isinstance(facts, str):
            raise _unusable(node, facts)
        return facts

    async def start(self, host: str, spec: MachineAgentSpec, log: Path) -> StartedAgent:
        words = self._spaces[host].command((self._python, *AGENT))
        return await start_by_command(words, spec, log)


def _unusable(node: NodeSpace, why: str) -> ConfigError:
    return ConfigError(f"{node.name} cannot be used", where="launcher", why=why)


def in_network(config: NamespacesConfig, network: str) -> MachinesConfig:
    """Returns what every launcher has of these settings, in a network that nobody else is on."""
    names = [one.name for one in fields(MachinesConfig)]
    own = {name: getattr(config, name) for name in names}
    return MachinesConfig(**{**own, "address": network, "private": [network]})
