"""The launcher ``nodes/command``: one node agent on each host, started through a command.

    facts     {command} python -m gcore_nodes.facts      all hosts at once
    agents    {command} python -m gcore_nodes.agent --stdin
    closing   the end of each agent's standard input, then of its command

The run's secret and its certificate come to an agent by standard input, so they are in no argument,
no environment variable and no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.launching import FoundNodes
from gcore_nodes.agent import MachineAgentSpec
from gcore_nodes.commands import ask_hosts, check_usable, command_for
from gcore_nodes.config import CommandConfig
from gcore_nodes.facts import MachineFacts
from gcore_nodes.hosts import find_hosts
from gcore_nodes.machines import AGENT, Host, MachinesLauncher, StartedAgent, start_by_command

log = logging.getLogger(__name__)
_LOOK_S = 3.0  # between two looks for hosts that have come


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
        self._left = set[str]()  # they come back when the list was without them

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
        may_grow = self._min_hosts is not None
        nodes = self.node_facts(present, devices, at_most=bool(missing) or may_grow)
        return FoundNodes(nodes=nodes, missing=missing, refusal=refusal, may_grow=may_grow)

    async def _ask(self, *, again: bool) -> tuple[list[Host], dict[str, str]]:
        """Asks all hosts; returns those that can be used, and why the others cannot.

        again: as in ``find_nodes``.
        Raises ConfigError when a run that begins has too few.
        """
        hosts = find_hosts(self._hosts)
        self._left &= {host.name for host in hosts}
        names = [host.name for host in hosts]
        timeout_s = self._again_s if again else self._start_s
        answers = await ask_hosts(self._command, names, self._python, timeout_s)
        present = [
            Host(name=host.name, facts=answer, slots=host.slots, number=number)
            for number, (host, answer) in enumerate(zip(hosts, answers, strict=True))
            if isinstance(answer, MachineFacts) and host.name not in self._left
        ]
        if not again and len(present) < (self._min_hosts or len(hosts)):
            check_usable(self._command, names, self._python, answers)
        _check_distinct([host.name for host in present], [host.facts for host in present])
        missing = {
            host.name: answer
            for host, answer in zip(hosts, answers, strict=True)
            if isinstance(answer, str)
        }
        missing |= {name: "it has left" for name in names if name in self._left}
        return present, missing

    @property
    def grows(self) -> bool:
        """A job that names one host has no other that could come; a file may get another line."""
        is_file = isinstance(self._hosts, str) and self._hosts != "slurm"
        return is_file or len(find_hosts(self._hosts)) > 1

    async def newcomer(self, present: Sequence[Host]) -> str:
        """Asks the hosts that the site does not have, again and again, until one can be used.

        A list in a file is read anew each time.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            name = await self._ask_absent(present)
            if name:
                return name

    async def _ask_absent(self, present: Sequence[Host]) -> str:
        """Returns the first host that can be used, of those that the site does not have; or ""."""
        try:
            named = find_hosts(self._hosts)
        except ConfigError as error:  # somebody is just writing the file
            log.warning("%s", error)
            return ""
        self._left &= {host.name for host in named}
        unwanted = {*self._left, *(host.name for host in present)}
        names = [host.name for host in named if host.name not in unwanted]
        answers = await ask_hosts(self._command, names, self._python, self._again_s)
        machines = {host.facts.machine for host in present}
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, MachineFacts) and answer.machine not in machines:
                return name
        return ""

    def let_go(self, host: str) -> None:
        """See ``MachinesLauncher``. It is not asked again while the list has it."""
        self._left.add(host)

    async def start(self, host: str, spec: MachineAgentSpec, log: Path) -> StartedAgent:
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
