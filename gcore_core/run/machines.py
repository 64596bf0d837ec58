"""Places a run on the machines that it can use now, and ends an attempt when these change.

A run that begins needs all machines that it names, unless its launcher's settings say that fewer
will do. One that begins again from a checkpoint takes what is left, as long as its job fits there:

    all named machines --one is lost--> those that are left --it answers again--> all, at a
                                          |                           checkpoint (cluster.grow)
                                          +-- the job does not fit: it waits, at most cluster.wait_s

Only a launcher that can leave machines out does so (``ElasticLauncher``). An attempt ends at its
next checkpoint where

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
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gcore_core.config.plan import Plan
from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError, PlacementError, WorkerDied, WorkerError
from gcore_core.contract.launching import ElasticLauncher, FoundNodes, Launcher, Site
from gcore_core.contract.traits import traits_of
from gcore_core.run.initial_placement import Placed, place, place_on_fewer
from gcore_core.run.jobs import Job

log = logging.getLogger(__name__)
_ASK_S = 5.0  # between two questions to all machines
_SAY_S = 30.0  # so often a run that waits says so
_LOOK_S = 1.0  # so often it is looked whether somebody has named a machine


async def place_run(
    plan: Plan,
    launcher: Launcher,
    say: Callable[[str], None],
    *,
    again: bool,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Placed:
    """Places an attempt of a run on the machines that there are.

    say: is told why the run waits, at once and then every half a minute.
    again: the run goes on by itself. It had its machines once, so it goes on with those that are
        left, and waits for more where these are too few.
    pause: waits for so many seconds of ``clock``.
    Raises what the launcher raises, PlacementError, and ConfigError when it has waited
    ``cluster.wait_s``.
    """
    devices = plan.settings.cluster.devices
    if not isinstance(launcher, ElasticLauncher):
        return place(plan, await launcher.nodes(devices))
    if not again:
        found = await launcher.find_nodes(devices, again=False)
        fit = place_on_fewer if found.missing or found.may_grow else place
        placed = fit(plan, found.nodes)
        return replace(placed, missing=found.missing)
    wait_s = plan.settings.cluster.wait_s
    began_s = clock()
    said_s = -_SAY_S
    while True:
        found = await launcher.find_nodes(devices, again=True)
        try:
            return _fitted(plan, found)
        except PlacementError as error:
            reason = str(error).partition("\n")[0]
        waited_s = clock() - began_s
        if waited_s >= wait_s:
            raise _not_enough(found, reason, wait_s)
        if waited_s - said_s >= _SAY_S:
            said_s = waited_s
            awaited = ", ".join(found.missing) or "machines"
            say(f"the run waits for {awaited}, {wait_s - waited_s:.0f} s more: {reason}")
        log.info("%s; missing: %s", reason, dict(found.missing))
        await pause(min(_ASK_S, wait_s - waited_s))


def _fitted(plan: Plan, found: FoundNodes) -> Placed:
    """Places a run on machines. Raises PlacementError, also where the launcher refuses them."""
    if found.refusal:
        raise PlacementError(found.refusal)
    placed = place_on_fewer(plan, found.nodes)
    return replace(placed, missing=found.missing)


def say_changes(
    plan: Plan,
    missing_before: Mapping[str, str],
    placed: Placed,
    say: Callable[[str], None],
) -> None:
    """Says which machines have come and gone, and how many slots each role has then."""
    lines = changes(missing_before, placed.missing)
    for line in lines:
        say(line)
    slots = placed.window.slots
    roles = plan.settings.roles.items()
    if lines or any(slots.get(role, node.slots) < node.slots for role, node in roles):
        told = [f"{role} {slots[role]} of {node.slots}" for role, node in roles]
        say(f"slots: {', '.join(told)}")


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a line for each machine that has been lost, and for each that is there again.

    before, now: host -> why it cannot be used.
    """
    lost = [
        f"{host} is missing, the run goes on without it: {_last_line(why)}"
        for host, why in now.items()
        if host not in before
    ]
    return [*lost, *(f"{host} is there again" for host in before if host not in now)]


def _last_line(text: str) -> str:
    return (text.splitlines() or [""])[-1]


def _not_enough(found: FoundNodes, reason: str, wait_s: float) -> ConfigError:
    missing = [f"{host}: {_last_line(why)}" for host, why in found.missing.items()]
    return ConfigError(
        "the run does not fit on the machines that are left",
        where="cluster",
        why="\n".join([reason, *missing[:2]]),
        todo=f"it has waited {wait_s:g} s (cluster.wait_s): fix them and call g-core resume, or "
        "resume it with fewer slots",
        missing=list(found.missing),
    )


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
    # Where an answer goes -> the host's name.
    _named: dict[Path, str] = field(default_factory=dict)

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
        """Lets go of machines that somebody names in the run's directory."""
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
