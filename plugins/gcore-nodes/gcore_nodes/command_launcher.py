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
from gcore_core.contract.launching import FoundNodes
from gcore_core.kits.launching import AgentSpec, MachineFacts
from gcore_core.kits.machines import AGENT, Host, MachinesLauncher, StartedAgent, start_by_command
from gcore_nodes.commands import ask_hosts, check_usable, command_for
from gcore_nodes.config import CommandConfig
from gcore_nodes.hosts import find_hosts


class CommandLauncher(MachinesLauncher):
    """Starts one node agent on each host, through a command; see ``CommandConfig``."""

    def __init__(self, config: CommandConfig) -> None:
        super().__init__(config, config.python or sys.executable)
        self._command = config.command
        self._hosts = config.hosts
        self._min_hosts = config.min_hosts
        self._start_s = config.start_s
        # One that answered a moment ago is not waited for as long as one that nobody has asked.
        self._again_s = min(config.start_s, 2 * config.patience_s)
        self._present: list[Host] = []  # those that ``find_nodes`` found

    @contextlib.asynccontextmanager
    async def hosts(self) -> AsyncIterator[list[Host]]:
        if self._present:
            yield self._present
        else:
            present, _ = await self._ask(again=False)
            yield present

    async def find_nodes(self, devices: int | str, *, again: bool) -> FoundNodes:
        """See ``ElasticLauncher``."""
        self._present = []
        present, missing = await self._ask(again=again)
        least = self._min_hosts or 1
        refusal = ""
        if len(present) < least:
            n_named = len(present) + len(missing)
            refusal = f"{len(present)} of {n_named} hosts answer, and at least {least} must"
        if not present:
            return FoundNodes(nodes=[], missing=missing, refusal=refusal)
        self._present = present
        nodes = self.node_facts(present, devices, at_most=bool(missing))
        return FoundNodes(nodes=nodes, missing=missing, refusal=refusal)

    async def _ask(self, *, again: bool) -> tuple[list[Host], dict[str, str]]:
        """Asks all hosts; returns those that can be used, and why the others cannot.

        again: as in ``find_nodes``.
        Raises ConfigError when a run that begins has too few.
        """
        hosts = find_hosts(self._hosts)
        names = [host.name for host in hosts]
        timeout_s = self._again_s if again else self._start_s
        answers = await ask_hosts(self._command, names, self._python, timeout_s)
        present = [
            Host(name=host.name, facts=answer, slots=host.slots, number=number)
            for number, (host, answer) in enumerate(zip(hosts, answers, strict=True))
            if isinstance(answer, MachineFacts)
        ]
        if not again and len(present) < (self._min_hosts or len(hosts)):
            check_usable(self._command, names, self._python, answers)
        _check_distinct([host.name for host in present], [host.facts for host in present])
        missing = {
            host.name: answer
            for host, answer in zip(hosts, answers, strict=True)
            if isinstance(answer, str)
        }
        return present, missing

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
