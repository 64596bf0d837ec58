"""Simulates machines of generators, each with a store of its own, and the loss of one of them.

Content goes from one store to another as between agents, with virtual time in place of sockets. The
machine "node0" has everybody but the replicas; its agent is served by the supervisor.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gcore_core.contract.errors import WorkerDied
from gcore_core.contract.launching import Peer
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import NewReplicas
from gcore_core.runtime.rpc.in_process import InlineNetwork, Weather
from gcore_core.runtime.store.bulk import What
from gcore_core.runtime.store.client import StoreWriter
from gcore_core.runtime.store.server import SlabService, StoreSpec
from gcore_core.testing.faults import Faults, LastingService, Life, MortalService, keep_lives

SECRET = b"secret of a simulated run"
HOME = "node0"
NEWCOMER = "new"  # the machine that comes within the run
_READ_S = 3.0  # the longest that a content is on its way
_TOLD_S = 15.0  # after which, at the latest, a controller hears of a lost machine


class NodesOfJob(Protocol):
    """What ``SimulatedJob`` says of machines."""

    @property
    def replicas(self) -> int: ...
    @property
    def generator_nodes(self) -> int: ...
    @property
    def loses_s(self) -> float: ...
    @property
    def comes_s(self) -> float: ...
    @property
    def leaves_s(self) -> float: ...
    @property
    def store_bytes(self) -> int: ...
    @property
    def seed(self) -> int: ...


def replicas_of_nodes(job: NodesOfJob) -> dict[str, list[str]]:
    """Returns node -> the replicas on it, for the machines of generators."""
    n = job.generator_nodes
    return {f"node{1 + k}": [f"rollout.{i}" for i in range(k, job.replicas, n)] for k in range(n)}


class SimulatedNodes:
    """The stores of a simulated run.

    seed: of the job.
    slabs: node -> its store.
    lost: the machine that was lost; "" before.
    coming: the replicas of the machine that comes within the run; [] where none does.
    freed: the machines that no shard asks any more.
    left: the machine that has left; "" before.
    """

    def __init__(self, network: InlineNetwork, job: NodesOfJob, store: Path) -> None:
        """store: the directory of the first node's store; others lie beside it."""
        self._network = network
        self._job = job
        self.seed = job.seed
        self._replicas = replicas_of_nodes(job)
        comes = job.comes_s >= 0
        self.coming = [f"rollout.{job.replicas + i}" for i in range(2)] if comes else []
        everybody = {**self._replicas, NEWCOMER: self.coming} if comes else self._replicas
        self._node_of = {name: node for node, names in everybody.items() for name in names}
        self._directories = {HOME: store}
        self._directories |= {node: store.with_name(f"{store.name}-{node}") for node in everybody}
        self.slabs = {node: self._slabs(node) for node in self._directories}
        self.lost = ""
        self.freed: list[str] = []
        self.left = ""
        self._is_free = asyncio.Event()

    def _slabs(self, node: str) -> SlabService:
        directory = self._directories[node]
        spec = StoreSpec(
            node=node,
            directory=str(directory),
            spill=f"{directory}-spill",
            budget_bytes=self._job.store_bytes,
        )
        slabs = SlabService(spec, SECRET)
        slabs._client = _Bulk(self)  # type: ignore[assignment]
        return slabs

    async def serve(self) -> None:
        """Serves the agents of all machines but the first."""
        for node in [node for node in self.slabs if node != HOME]:
            service = LastingService(node)
            self.slabs[node].register(service)
            await self._network.view(node).serve(node, service)

    def writer(self, life: Life) -> StoreWriter:
        """Returns what a process writes into its machine's store with."""
        node = self._node_of.get(life.name, HOME)
        view = self._network.view(life.name)
        home = view.peer("supervisor")
        agent = home if node == HOME else view.peer(node)
        owner = f"{life.name}-{life.number}"
        return _Writer(self._directories[node], node, SECRET, agent, owner, home)

    def buried(self, life: Life) -> None:
        """A process has ended: nobody writes into its slabs any more."""
        node = self._node_of.get(life.name, HOME)
        self.slabs[node].ended(f"{life.name}-{life.number}")

    async def have_one_come(
        self,
        contexts: Sequence[ControllerContext],
        births: Mapping[str, Callable[[Life], MortalService]],
    ) -> None:
        """Has a machine come at its time, if the job says so; the lead hears of it last."""
        if self._job.comes_s < 0:
            return
        dice = random.Random(self._job.seed + round(1000 * self._job.comes_s))
        await asyncio.sleep(self._job.comes_s)
        for name in self.coming:
            await self._network.view(name).serve(name, births[name](Life(name, 0)))
        new = NewReplicas(NEWCOMER, self.coming, {})
        for context in reversed(contexts):
            await asyncio.sleep(dice.uniform(0, _TOLD_S / len(contexts)))
            assert context.newcomers is not None
            context.newcomers.meet(new)
        self._replicas = {**self._replicas, NEWCOMER: self.coming}

    async def lose_one(
        self, contexts: Sequence[ControllerContext], weather: Weather | None
    ) -> None:
        """Loses a machine at its time, if the job says so; then each controller hears of it."""
        if self._job.loses_s < 0:
            return
        keep_lives()
        dice = random.Random(self._job.seed + round(1000 * self._job.loses_s))
        await asyncio.sleep(self._job.loses_s)
        self.lost = dice.choice(sorted(self._replicas))
        self._end(self.lost, weather)

        async def tell(context: ControllerContext) -> None:
            await asyncio.sleep(dice.uniform(0, _TOLD_S))
            assert context.lost.lose(self.lost)

        await asyncio.gather(*map(tell, contexts))

    async def have_one_leave(
        self, contexts: Sequence[ControllerContext], weather: Weather | None
    ) -> None:
        """Has a machine leave at its time, if the job says so; it ends with the step that frees it.

        The lead hears of it last.
        """
        if self._job.leaves_s < 0:
            return
        dice = random.Random(self._job.seed + round(1000 * self._job.leaves_s))
        await asyncio.sleep(self._job.leaves_s)
        node = dice.choice(sorted(self._replicas))
        for context in reversed(contexts):
            await asyncio.sleep(dice.uniform(0, _TOLD_S / len(contexts)))
            assert context.lost.leave(node)
        await self._is_free.wait()
        self.left = node
        self._end(node, weather)
        for context in contexts:
            await asyncio.sleep(dice.uniform(0, _TOLD_S / len(contexts)))
            assert context.lost.lose(node)

    def step_ended(self) -> None:
        """Lets the machine go that no shard asks any more."""
        if self.freed:
            self._is_free.set()

    def _end(self, node: str, weather: Weather | None) -> None:
        """Ends a machine with all its processes."""
        for name in self._replicas[node]:
            if isinstance(weather, Faults):
                weather.forget(name)
            service = self._network.services.pop(name, None)
            if isinstance(service, MortalService):
                service.life.end()
        self._network.services.pop(node, None)


class _Writer(StoreWriter):
    """A replica's writer. Its pushes come through the memory of the first machine."""

    def __init__(
        self, directory: Path, node: str, secret: bytes, agent: Peer, owner: str, home: Peer
    ) -> None:
        super().__init__(directory, node, secret, agent, owner)
        self._home = home

    @property
    def place(self) -> tuple[str, Peer]:
        return HOME, self._home


class _Bulk:
    """Reads what other machines have, in place of ``BulkClient``."""

    def __init__(self, nodes: SimulatedNodes) -> None:
        self._nodes = nodes
        self._dice = random.Random(nodes.seed)

    async def read(
        self,
        node: str,
        what: What,
        memory: memoryview,
        progress: Callable[[], None],
        is_unmapped: bool = False,
    ) -> None:
        await asyncio.sleep(self._dice.uniform(0, _READ_S))
        if node in (self._nodes.lost, self._nodes.left):
            raise WorkerDied("its machine is lost", where=node, process=node)
        region = self._nodes.slabs[node]._find(what)
        with region.path.open("rb") as file:
            file.seek(region.offset)
            file.readinto(memory)
