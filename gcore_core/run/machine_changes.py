"""Ends an attempt at its next checkpoint, when the run is to go on with other machines.

    a machine has come    the site does not have it (``Site.newcomer``), and a role has fewer slots
                          than the job gives it
    one is to leave       its agent got a SIGTERM, or somebody has named it in the run's directory
                          (``run_files.LEAVE``); a checkpoint is asked for at once

The lead ends there as when a signal stops the run, so nothing is made twice. ``run.attempts`` makes
another attempt from that checkpoint, on the machines that there are then. With ``cluster.grow:
never`` no attempt ends so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from gcore_core.contract import run_files
from gcore_core.contract.errors import PlacementError, WorkerDied, WorkerError
from gcore_core.contract.launching import Site
from gcore_core.contract.traits import traits_of
from gcore_core.run.initial_placement import place_on_fewer
from gcore_core.run.jobs import Job

log = logging.getLogger(__name__)
_LOOK_S = 1.0  # so often it is looked whether somebody has named a machine


class MachinesChange(WorkerError):
    """Ends an attempt that has saved its state, so that another begins on other machines."""


@dataclass(kw_only=True)
class MachineChanges:
    """Knows whether one attempt of a run is to end at its next checkpoint.

    note: shows a line to a person.
    save: has a checkpoint saved at the end of the step that runs.
    is_due: whether it is to end there.
    """

    job: Job
    site: Site
    note: Callable[[str], None]
    save: Callable[[], Awaitable[None]]
    is_due: bool = False
    _leaving: set[str] = field(default_factory=set)  # nodes
    _named: dict[Path, str] = field(default_factory=dict)  # where an answer goes -> the host's name

    async def watch(self) -> None:
        """Notes which machines come and which are to leave, for as long as the attempt lasts."""
        parts = [self._look()]
        if self._may_change:
            parts.append(self._newcomer())
            parts += [self._asks(name) for name in self.site.nodes]
        await asyncio.gather(*parts)

    def say_left(self) -> None:
        """Answers that machines have left, when nothing of the attempt is there any more."""
        for file, host in self._named.items():
            _answer(file, f"{host} has left")

    @property
    def _may_change(self) -> bool:
        return self.job.plan.settings.cluster.grow == "checkpoint"

    async def _newcomer(self) -> None:
        """Waits for one machine that has come, where the run has room for it."""
        slots = self.job.placed.window.slots
        plan = self.job.plan
        roles = plan.settings.roles.items()
        has_room = any(slots.get(role, one.slots) < one.slots for role, one in roles)
        if not has_room or traits_of(plan.objects.get("controller")).pushes_nearby:
            return
        if self.site.newcomer is not None:
            host = await self.site.newcomer()
            self._end_at_checkpoint(f"{host} has come; the run takes it in")

    async def _asks(self, node: str) -> None:
        """Waits until a machine asks to leave."""
        asks_to_leave = self.site.nodes[node].asks_to_leave
        if asks_to_leave is None:
            return
        with contextlib.suppress(WorkerDied):  # who watches the agent sees to that
            await asks_to_leave()
            await self._leave(node)

    async def _look(self) -> None:
        """Has machines leave that somebody names in the run's directory."""
        while True:
            for file in _empty_files(self.job.directory / run_files.LEAVE):
                hosts = {node: self.job.placed.host(node) for node in self.site.nodes}
                node = next((one for one, host in hosts.items() if file.name in (one, host)), "")
                if why := self._refusal(node):
                    _answer(file, f"{hosts.get(node, file.name)} does not leave: {why}")
                else:
                    _answer(file, f"{hosts[node]} leaves at the next checkpoint")
                    self._named[file] = hosts[node]
                    await self._leave(node)
            await asyncio.sleep(_LOOK_S)

    def _refusal(self, node: str) -> str:
        """Returns why a machine does not leave when a person names it; "" where it does."""
        if node not in self.site.nodes:
            return f"the run has {', '.join(map(self.job.placed.host, self.site.nodes))}"
        if node == self.site.home:
            return "g-core run is there"
        if not self._may_change:
            return "cluster.grow is never"
        if self.site.nodes[node].let_go is None:
            return "the job's launcher leaves out no machine, see its min_hosts"
        gone = {*self._leaving, node}
        try:
            place_on_fewer(
                self.job.plan, [one for one in self.job.placed.nodes if one.name not in gone]
            )
        except PlacementError as error:
            return f"the job does not fit on the others: {str(error).splitlines()[0]}"
        return ""

    async def _leave(self, node: str) -> None:
        let_go = self.site.nodes[node].let_go
        if node in self._leaving or let_go is None:
            return
        self._leaving.add(node)
        let_go()
        self._end_at_checkpoint(f"{self.job.placed.host(node)} leaves; the run goes on without it")
        await self.save()

    def _end_at_checkpoint(self, line: str) -> None:
        log.info("%s at its next checkpoint", line)
        self.note(f"{line} at its next checkpoint")
        self.is_due = True


def _empty_files(directory: Path) -> list[Path]:
    """Returns the files of a directory that nobody has answered yet."""
    try:
        files = [path for path in directory.iterdir() if not path.name.startswith(".")]
        return [path for path in files if not path.stat().st_size]
    except OSError:  # there is none, or somebody is just removing a file
        return []


def _answer(file: Path, line: str) -> None:
    try:
        file.write_text(f"{line}\n")
    except OSError as error:
        log.warning("%s: %s", file, error)
