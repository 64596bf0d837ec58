"""The launcher ``nodes/command``: one node agent on each host, started through a command.

    facts     {command} python -m gcore_core.runtime.process.facts      all hosts at once
    agents    {command} python -m gcore_core.runtime.process.agent --stdin
    closing   the end of each agent's standard input, then of its command

The run's secret and its certificate come to an agent by standard input, so they are in no argument,
no environment variable and no file.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.launching import AgentSpec, MachineFacts
from gcore_core.kits.machines import AGENT, Host, MachinesLauncher, StartedAgent, start_by_command
from gcore_nodes.commands import ask_facts, command_for
from gcore_nodes.config import CommandConfig
from gcore_nodes.hosts import find_hosts


class CommandLauncher(MachinesLauncher):
    """Starts one node agent on each host, through a command; see ``CommandConfig``."""

    def __init__(self, config: CommandConfig) -> None:
        super().__init__(config, config.python or sys.executable)
        self._command = config.command
        self._hosts = config.hosts
        self._start_s = config.start_s

    @contextlib.asynccontextmanager
    async def hosts(self) -> AsyncIterator[list[Host]]:
        hosts = find_hosts(self._hosts)
        names = [host.name for host in hosts]
        answers = await ask_facts(self._command, names, self._python, self._start_s)
        _check_distinct(names, answers)
        yield [
            Host(name=host.name, facts=facts, slots=host.slots)
            for host, facts in zip(hosts, answers, strict=True)
        ]

    async def start(self, host: str, spec: AgentSpec, log: Path) -> StartedAgent:
        command = command_for(self._command, host, (self._python, *AGENT))
        return await start_by_command(command, spec, log)


def _check_distinct(names: Sequence[str], answers: Sequence[MachineFacts]) -> None:
    """Raises ConfigError when two names are one machine."""
    by_machine: dict[str, str] = {}
    for name, facts in zip(names, answers, strict=True):
        other = by_machine.setdefault(facts.machine, name)
        if other != name:
            raise ConfigError(
                f"{other} and {name} are one machine, {facts.host}",
                where="launcher.config.hosts",
                todo="name it once; an agent uses all devices of its host",
            )
