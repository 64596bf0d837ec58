"""Takes newcomers in: machines that come within a run get replicas of the policy's generator.

    the launcher finds one    it has devices, and the run has fewer replicas than slots
    taken in                  an agent, the job's files, a replica for each share of its devices
    up                        every replica has said hello
    admitted                  the controllers know them, and the lead takes them in before a push
    published                 they hold the weights, and draw

Nothing of the run waits for a machine before it is admitted, and until then nothing that happens to
it ends the run: it is let go, and the run says why. From then on it is an expendable machine, whose
loss the step survives (``gcore_core.controllers.lost_nodes``).

Trainers, judges and scorers stay where they are until the run begins again from a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gcore_core.contract.abilities import replica_slots
from gcore_core.contract.deadlines import Wait
from gcore_core.contract.errors import GcoreError, WorkerDied, WorkerError
from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.launching import NodeFacts, Site
from gcore_core.contract.placement import Device
from gcore_core.run.homecoming import Homecoming
from gcore_core.run.initial_placement import Placed
from gcore_core.run.job_files import provide
from gcore_core.run.jobs import Job, worker_specs
from gcore_core.run.lost_nodes import replicas_left
from gcore_core.runtime.messages import (
    ADMIT,
    EXITS,
    MEET_NODE,
    SPAWN,
    MeetNode,
    NewReplicas,
    Nothing,
    SpawnRequest,
)
from gcore_core.runtime.rpc.retry import insist

log = logging.getLogger(__name__)
_LOOK_S = 1.0  # so often it is looked whether the run could use a machine
_AGAIN_S = 5.0  # after one that could not be taken in


def room_for_replicas(job: Job, site: Site, lost: Collection[str]) -> int:
    """Returns how many replicas the run could have besides those that it has."""
    slots = job.plan.settings.roles[ROLLOUT].slots
    return slots // _size(job) - replicas_left(site.where, lost)


def place_newcomer(placed: Placed, facts: NodeFacts, size: int, room: int) -> Placed:
    """Returns the placement with replicas on the devices of a machine that has come.

    Their numbers follow those of all that were placed before.

    size: devices of one replica.
    room: how many replicas may be placed.
    """
    count = min(room, len(facts.devices) // size)
    first = len(placed.window.devices)
    devices = [
        Device(index=first + number, kind=device.kind, node=facts.name, number=device.local_index)
        for number, device in enumerate(facts.devices)
    ]
    replicas = [
        [device.index for device in devices[i * size : (i + 1) * size]] for i in range(count)
    ]
    return replace(
        placed,
        nodes=(*placed.nodes, facts),
        window=replace(placed.window, devices=(*placed.window.devices, *devices)),
        workers={**placed.workers, ROLLOUT: [*placed.workers[ROLLOUT], *replicas]},
    )


def _size(job: Job) -> int:
    return replica_slots(job.plan.objects[f"roles.{ROLLOUT}"])


@dataclass(kw_only=True)
class Come:
    """Is a machine that has been admitted.

    job: the job with its replicas placed.
    """

    facts: NodeFacts
    job: Job
    replicas: list[str]


@dataclass
class RunNewcomers:
    """Takes machines in, one after the other, for one attempt of a run.

    job: grows with each machine.
    homecoming: brings home what is written there; None: nothing is.
    controllers: names of those that have not ended.
    lost: names of machines that are lost.
    admitted: is called with each machine as soon as the controllers know it.
    note: shows a line to a person.
    n_come: how many machines were admitted.
    """

    job: Job
    site: Site
    homecoming: Homecoming | None
    controllers: Collection[str]
    lost: Collection[str]
    admitted: Callable[[Come], None]
    note: Callable[[str], None]
    n_come: int = 0
    _coming: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # replica -> its hello

    async def run(self) -> None:
        """Takes machines in for as long as the attempt lasts."""
        newcomers = self.site.newcomers
        if newcomers is None:
            return
        said = ""
        while True:
            while room_for_replicas(self.job, self.site, self.lost) < 1:
                await asyncio.sleep(_LOOK_S)
            facts = await newcomers.next()
            name = facts.host or facts.name
            try:
                come = await self._take_in(facts)
            except GcoreError as error:
                log.warning("%s is not taken in: %s", name, error)
                line = f"{name} has come and is not taken in: {_first_line(error)}"
                if line != said:
                    self.note(line)
                said = line
                with contextlib.suppress(GcoreError):
                    await newcomers.let_go(facts.name, _first_line(error))
                await asyncio.sleep(_AGAIN_S)
                continue
            if come is None:  # the run is ending
                return
            self.n_come += 1

    # -- what workers say --------------------------------------------------------------------------

    def up(self, process: str) -> None:
        """Notes that a process is up. Only replicas that are coming are waited for here."""
        hello = self._coming.get(process)
        if hello is not None and not hello.done():
            hello.set_result(None)

    def fails(self, process: str, error: GcoreError) -> bool:
        """Returns whether a process is a replica that is coming; takes its error then.

        Such an error keeps the machine out and does not end the run.
        """
        hello = self._coming.get(process)
        if hello is None:
            return False
        if not hello.done():
            hello.set_exception(error)
        return True

    # -- one machine -------------------------------------------------------------------------------

    async def _take_in(self, facts: NodeFacts) -> Come | None:
        """Takes one machine in. Raises what stands against it; None: the run is ending."""
        assert self.site.newcomers is not None
        room = room_for_replicas(self.job, self.site, self.lost)
        before = self.job.workers(ROLLOUT)
        placed = place_newcomer(self.job.placed, facts, _size(self.job), room)
        job = replace(self.job, placed=placed)
        replicas = job.workers(ROLLOUT)[len(before) :]
        if not replicas:
            raise WorkerError(
                f"it has {len(facts.devices)} devices and a replica needs {_size(job)}",
                where=facts.host,
            )
        await self.site.newcomers.take_in(facts.name, replicas)
        try:
            if self.homecoming is not None:
                await self.homecoming.add(facts.name)
            await provide(job, self.site, lambda text, share: log.info("%s", text), facts.name)
            await self._introduce(facts.name)
            await self._start(job, facts.name, replicas)
        except BaseException:
            if self.homecoming is not None:
                self.homecoming.lose(facts.name)
            raise
        self.job = job
        come = Come(facts=facts, job=job, replicas=replicas)
        if not await self._admit(come):
            return None
        return come

    async def _introduce(self, node: str) -> None:
        """Tells the agents of all other machines where content of the new one is to be had."""
        request = MeetNode(node, self.site.bulk[node])
        for name, other in list(self.site.nodes.items()):
            if name != node and name not in self.lost:
                with contextlib.suppress(WorkerDied):  # who watches its agent sees to that
                    await other.agent.call(MEET_NODE, request)

    async def _start(self, job: Job, node: str, replicas: Sequence[str]) -> None:
        """Starts the replicas, and returns when all are up. Raises what kept one from it."""
        loop = asyncio.get_running_loop()
        agent = self.site.nodes[node].agent
        specs = [spec for spec in worker_specs(job, self.site) if spec.name in replicas]
        self._coming = {name: loop.create_future() for name in replicas}
        exiting = asyncio.ensure_future(self._first_end(node))
        everybody: asyncio.Future[Any] = asyncio.gather(*self._coming.values())
        try:
            await agent.call(SPAWN, SpawnRequest(specs))
            deadline_s = self.site.network.deadlines.seconds(Wait.WORK)
            waited: list[asyncio.Future[Any]] = [exiting, everybody]
            await asyncio.wait(waited, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if everybody.done():
                everybody.result()
            elif exiting.done():
                exiting.result()
            else:
                missing = [name for name, hello in self._coming.items() if not hello.done()]
                raise WorkerError(
                    f"{', '.join(missing)} did not come up within {deadline_s:g} s", where=node
                )
            if exiting.done():  # one has ended just after it came up
                exiting.result()
        finally:
            self._coming = {}
            exiting.cancel()
            everybody.cancel()
            await asyncio.gather(exiting, everybody, return_exceptions=True)

    async def _first_end(self, node: str) -> None:
        """Raises WorkerDied when a replica has ended for good, or the machine is gone."""
        async for exited in self.site.nodes[node].agent.stream(EXITS, Nothing()):
            if not exited.restarted:
                raise WorkerDied(
                    f"{exited.name} has ended with {exited.code} while it was starting",
                    where=node,
                    why=exited.tail.rpartition("\n")[2],
                )

    async def _admit(self, come: Come) -> bool:
        """Tells the controllers, the lead last; returns whether all that go on know it."""
        node = come.facts.name
        addresses = {name: self.site.public[name] for name in (node, *come.replicas)}
        request = NewReplicas(node, come.replicas, addresses)
        for name in sorted(self.controllers, reverse=True):
            try:
                await insist(self.site.network.peer(name), ADMIT, request)
            except WorkerDied:
                if name in self.controllers:
                    raise
                return False
        # Not before all know it: a controller can be told only of the loss of replicas it has.
        self.admitted(come)
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
