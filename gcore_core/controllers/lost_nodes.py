"""Knows which machines are lost while the run goes on without them, and whom to ask instead.

A machine is *expendable* when it has nothing of the run but the policy's generators and scorers
that others can stand in for. Where one is lost, the supervisor tells every controller (``lose``):

    a generator's leases   another replica draws them, with the same seeds
    a scorer's records     another process of the same worker scores them
    its records            those without a verdict are drawn again (``Ledger.forget``); those with
                           one have a copy elsewhere (``window.keeping``)
    a push                 begins anew without its replicas

A machine that is lost stays lost until the run begins again from a checkpoint.

One that *leaves* on purpose is told to the controllers before (``leave``). Its replicas finish what
they have begun and get no new leases. From the lead's next decision on, which comes before a push,
no shard asks them (``PlacementShard.decide``), so nothing is drawn again when it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from gcore_core.contract.errors import WorkerDied
from gcore_core.contract.launching import (
    Endpoint,
    Item,
    Network,
    Peer,
    Reply,
    Request,
    StreamEndpoint,
)
from gcore_core.contract.records import Header, Ref
from gcore_core.runtime.rpc.retry import gone

T = TypeVar("T")


class LostNodes:
    """Knows the expendable machines of a run, and which of them are lost.

    survivable: whether the step program goes on without them. ``Window`` sets it, since it keeps
        what must outlive them.
    """

    def __init__(self, expendable: Mapping[str, Sequence[str]] | None = None) -> None:
        """expendable: node -> the processes on it, of those that controllers ask."""
        self._node_of = {
            process: node for node, names in (expendable or {}).items() for process in names
        }
        self._is_lost = {node: asyncio.Event() for node in expendable or {}}
        self._leaving: dict[str, bool] = {}  # node -> whether the lead has taken it out
        self._any_lost = False  # so that most runs answer ``holds`` without a look at references
        self.survivable = False

    def add(self, node: str, processes: Sequence[str]) -> None:
        """Notes an expendable machine that has come within the run, and what is on it."""
        self._node_of |= dict.fromkeys(processes, node)
        self._is_lost[node] = asyncio.Event()

    def lose(self, node: str) -> bool:
        """Notes that a machine is lost; returns whether the program goes on without it.

        From here on nobody waits for a process of it any more.
        """
        if not self.survivable or node not in self._is_lost:
            return False
        self._is_lost[node].set()
        self._any_lost = True
        return True

    def leave(self, node: str) -> bool:
        """Notes that a machine is about to leave; returns whether the program does without it."""
        if not self.survivable or node not in self._is_lost:
            return False
        self._leaving.setdefault(node, False)
        return True

    def leaves(self, process: str) -> bool:
        """Whether a process is on a machine that is about to leave, or has left."""
        return self._node_of.get(process) in self._leaving

    def take_leaving(self) -> list[str]:
        """Returns the machines that are about to leave, each once; the lead asks."""
        nodes = [node for node, is_out in self._leaving.items() if not is_out]
        self._leaving.update(dict.fromkeys(nodes, True))
        return nodes

    def is_on(self, process: str, nodes: Collection[str]) -> bool:
        """Whether a process is on one of these machines."""
        return self._node_of.get(process) in nodes

    def names(self) -> list[str]:
        """Returns the machines that are lost."""
        return [node for node, is_lost in self._is_lost.items() if is_lost.is_set()]

    def has(self, process: str) -> bool:
        """Whether a process was on a machine that is lost."""
        if not self._any_lost:
            return False
        node = self._node_of.get(process)
        return node is not None and self._is_lost[node].is_set()

    def may_lose(self, ref: Ref) -> bool:
        """Whether content lies on a machine that the run can lose, or has lost."""
        return self.survivable and ref.node in self._is_lost

    def holds(self, header: Header) -> bool:
        """Whether any content of a record was on a machine that is lost."""
        # It is asked of every record several times, and most runs lose nothing.
        return self._any_lost and any(
            ref.node in self._is_lost and self._is_lost[ref.node].is_set()
            for ref in refs_of(header)
        )

    async def unless_lost(self, node: str, work: Awaitable[T], process: str) -> T:
        """Returns what ``work`` gives, and cancels it when the machine is lost.

        Raises the error of a process that does not come back then (``is_gone``).

        process: what the error is about.
        """
        doing = asyncio.ensure_future(work)
        losing = asyncio.ensure_future(self._is_lost[node].wait())
        try:
            await asyncio.wait((doing, losing), return_when=asyncio.FIRST_COMPLETED)
            if not losing.done():
                return doing.result()
            raise gone(process)
        finally:
            doing.cancel()
            losing.cancel()
            await asyncio.gather(doing, losing, return_exceptions=True)

    def peer(self, network: Network, process: str) -> Peer:
        """Returns a process, which raises an error at once when its machine is lost."""
        node = self._node_of.get(process)
        peer = network.peer(process)
        return peer if node is None else _LosablePeer(peer, self, node)

    def stand_in(
        self,
        peers: Sequence[Peer],
        index: int,
        others: Callable[[], Sequence[Peer]] = tuple,
        *,
        spares_leaving: bool = False,
    ) -> Peer:
        """Returns the peer of that number, or another one that is not lost in its place.

        Raises its error where all are lost.

        others: returns those that are asked where all of ``peers`` are lost; called only then.
        spares_leaving: one that stays is also asked in the place of one that is about to leave.
        """
        name = peers[index].name
        if not self.has(name) and not (spares_leaving and self.leaves(name)):
            return peers[index]
        left = [peer for peer in peers if not self.has(peer.name)]
        left = left or [peer for peer in others() if not self.has(peer.name)]
        if not left:
            raise gone(name)
        if spares_leaving:
            left = [peer for peer in left if not self.leaves(peer.name)] or left
        return left[index % len(left)]


class _LosablePeer:
    """A process of an expendable machine. Requests under way end when the machine is lost."""

    def __init__(self, peer: Peer, lost: LostNodes, node: str) -> None:
        self.name = peer.name
        self._peer = peer
        self._lost = lost
        self._node = node

    async def call(
        self,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> Reply:
        call = self._peer.call(endpoint, request, deadline_s=deadline_s)
        return await self._lost.unless_lost(self._node, call, self.name)

    async def stream(
        self,
        endpoint: StreamEndpoint[Request, Item],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Item, None]:
        came = asyncio.Queue[list[Item]]()  # an empty list says that no more come

        async def read() -> None:
            stream = self._peer.stream(endpoint, request, deadline_s=deadline_s)
            async with contextlib.aclosing(stream):
                async for item in stream:
                    came.put_nowait([item])

        async def read_unless_lost() -> None:
            await self._lost.unless_lost(self._node, read(), self.name)

        # One task reads from the beginning to the end: what is beneath may belong to a task.
        reading = asyncio.ensure_future(read_unless_lost())
        reading.add_done_callback(lambda _: came.put_nowait([]))
        try:
            while items := await came.get():
                yield items[0]
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def close(self) -> None:
        await self._peer.close()


class StandInPeer:
    """One of several processes that do the same: the first, or another when that is lost.

    name: of the first.
    """

    def __init__(self, peers: Sequence[Peer], lost: LostNodes) -> None:
        self.name = peers[0].name
        self._peers = peers
        self._lost = lost

    async def call(
        self,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> Reply:
        """Calls the first process that is not lost.

        When its machine is lost meanwhile, the error no longer says that nobody comes back
        (``is_gone``) as long as another process is left: so ``insist`` calls again, and that one
        stands in.
        """
        peer = self._lost.stand_in(self._peers, 0)
        try:
            return await peer.call(endpoint, request, deadline_s=deadline_s)
        except WorkerDied as error:
            if self._lost.has(peer.name) and any(not self._lost.has(p.name) for p in self._peers):
                error.facts.pop("is_gone", None)
            raise

    async def stream(
        self,
        endpoint: StreamEndpoint[Request, Item],
        request: Request,
        *,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Item, None]:
        peer = self._lost.stand_in(self._peers, 0)
        async with contextlib.aclosing(
            peer.stream(endpoint, request, deadline_s=deadline_s)
        ) as stream:
            async for item in stream:
                yield item

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers))


def refs_of(header: Header) -> list[Ref]:
    """Returns the references of a record's content."""
    columns = [] if header.columns is None else [header.columns]
    return [*columns, *header.media.values()]
