"""Lets machines leave a run on purpose, without a record that is drawn twice.

Only a machine with nothing but replicas of the policy's generator can leave, and one that has
nothing of the run.

    an agent asks       it got a SIGTERM, or ``LEAVE``: somebody has named its machine in the run's
                        directory (``run_files.LEAVE``)
    refused             something else is there, or too few replicas would be left
    told                every controller: the machine's replicas finish what they have, and get
                        nothing new
    freed               the lead has taken the replicas out, before a push
    gone                after the end of that step, the machine's last lines of logs and journals
                        are brought home and its agent ends

Until it is freed it is a machine like any other: when it ends before, it is lost, and the step goes
on as it does then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gcore_core.contract import run_files
from gcore_core.contract.errors import GcoreError, WorkerDied
from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.launching import Site
from gcore_core.run.homecoming import Homecoming
from gcore_core.run.lost_nodes import replicas_left
from gcore_core.runtime.messages import (
    LEAVE,
    LEAVE_NODE,
    LEAVING,
    LOSE_NODE,
    STAY,
    LostNode,
    Nothing,
    Stay,
)
from gcore_core.runtime.rpc.retry import insist

log = logging.getLogger(__name__)
_LOOK_S = 1.0  # so often it is looked whether somebody has named a machine


@dataclass(kw_only=True)
class LeavingNodes:
    """Lets machines leave, for one attempt of a run.

    directory: the run's.
    homecoming: brings home what is written there; None: nothing is.
    controllers: names of those that have not ended.
    expendable: node -> processes on it, of each node that the run can lose in a step.
    lost: names of the nodes that are lost; those that have left are added.
    least: so many replicas are to be left.
    host: returns what a person calls a node.
    note: shows a line to a person.
    is_up: set when every process of the run is.
    left: names of the nodes that have left.
    """

    directory: Path
    site: Site
    homecoming: Homecoming | None
    controllers: Collection[str]
    expendable: Mapping[str, list[str]]
    lost: set[str]
    least: int
    host: Callable[[str], str]
    note: Callable[[str], None]
    is_up: asyncio.Event
    left: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)  # nodes that all controllers do without
    # node -> where its answers go: one file for each of its names by which it is asked
    _files: dict[str, set[Path]] = field(default_factory=dict)
    _freed: list[str] = field(default_factory=list)  # nodes that go when the step has ended
    _ending: set[asyncio.Future[None]] = field(default_factory=set)  # or they could be collected

    async def watch(self, node: str) -> None:
        """Handles what an agent asks, for as long as it is there."""
        agent = self.site.nodes[node].agent
        with contextlib.suppress(WorkerDied):  # who watches the agent sees to that
            async for _ in agent.stream(LEAVING, Nothing()):
                await self.is_up.wait()
                if why := await self._refusal(node):
                    await agent.call(STAY, Stay(why))
                    await self._say(node, f"{self.host(node)} does not leave: {why}")
                elif node not in self.site.where.values():
                    await self._let_go(node)
                else:
                    await self._say(
                        node, f"{self.host(node)} finishes what it has begun, and leaves then"
                    )

    async def look(self) -> None:
        """Has the machines asked that a person names in the run's directory, see ``run_files``."""
        directory = self.directory / run_files.LEAVE
        while True:
            for file in _empty_files(directory):
                await self._named(file)
            await asyncio.sleep(_LOOK_S)

    def freed(self, nodes: Collection[str]) -> None:
        """Notes that no shard asks the replicas of these nodes any more."""
        self._freed += nodes

    async def step_ended(self) -> None:
        """Lets those go that are freed: nothing of the step is read there any more."""
        nodes, self._freed = self._freed, []
        for node in nodes:
            if node not in self.lost:
                await self._let_go(node)

    async def close(self) -> None:
        """Waits for the end of those that have been let go."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    # -- one machine -------------------------------------------------------------------------------

    async def _named(self, file: Path) -> None:
        """Has a machine asked that a file is named after; the answer goes into the file."""
        names = [
            node
            for node in self.site.nodes
            if file.name in (node, self.host(node)) and node not in self.lost
        ]
        if not names:
            hosts = sorted({self.host(node) for node in self.site.nodes if node not in self.lost})
            _answer(file, f"{file.name} does not leave: the run has {', '.join(hosts)}")
        elif self.site.nodes[names[0]].let_go is None:
            _answer(file, f"{file.name} does not leave: g-core run is there")
        else:
            _answer(file, f"{file.name} is asked to leave")
            self._files.setdefault(names[0], set()).add(file)
            with contextlib.suppress(WorkerDied):
                await self.site.nodes[names[0]].agent.call(LEAVE, Nothing())

    async def _refusal(self, node: str) -> str:
        """Has the controllers do without a node, where it may go.

        Returns why it has to stay; "" where it may go, or was let go before.
        """
        here = [name for name, there in self.site.where.items() if there == node]
        if not here or node in self._told:
            return ""
        others = [name for name in here if name.rpartition(".")[0] != ROLLOUT]
        if others:
            return f"it has {', '.join(others)}, and only generators can leave within a run"
        if node not in self.expendable:
            return "a job whose placement policy moves devices needs all of them"
        n_left = replicas_left(self.site.where, {*self.lost, *self._told, node})
        if n_left < self.least:
            return f"{n_left} replicas would be left, and roles.{ROLLOUT}.least is {self.least}"
        self._told.add(node)
        for name in sorted(self.controllers, reverse=True):  # the lead last: it takes them out
            if not await self._tell(name, node):
                self._told.discard(node)
                return "the step program cannot go on without it"
        return ""

    async def _tell(self, controller: str, node: str) -> bool:
        try:
            peer = self.site.network.peer(controller)
            return (await insist(peer, LEAVE_NODE, LostNode(node))).goes_on
        except WorkerDied:
            return False

    async def _let_go(self, node: str) -> None:
        """Ends a node of which nothing is needed any more."""
        here = [name for name, there in self.site.where.items() if there == node]
        self.lost.add(node)
        self.left.add(node)
        if self.homecoming is not None:
            await self.homecoming.drain()
            self.homecoming.lose(node)
        for name in sorted(self.controllers):
            with contextlib.suppress(WorkerDied):  # it has ended
                await insist(self.site.network.peer(name), LOSE_NODE, LostNode(node))
        processes = f" with {', '.join(here)}" if here else ""
        line = f"{self.host(node)} has left{processes}; nothing of it is drawn again"
        await self._say(node, line)
        let_go = self.site.nodes[node].let_go
        assert let_go is not None
        ending = asyncio.ensure_future(let_go())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _say(self, node: str, line: str) -> None:
        self.note(line)
        for file in self._files.get(node, ()):
            _answer(file, line)
        tell = self.site.nodes[node].tell
        if tell is not None:
            with contextlib.suppress(GcoreError, OSError):
                await tell(line)


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
