"""Keeps what must outlive the machines of generators: the records that a step is to train on.

A record lies in the memory of the machine that drew it. Before its group gets the verdict that it
is trained on, its content is copied to a machine of the trainer, where it would be copied to train
on it anyhow, and its header names the copy. So no verdict rests on a machine that the run may lose:

    drawn, scored    on the generator's machine   is it lost: drawn again, with the same seeds
    copied           on a trainer's machine
    TRAINED          on a trainer's machine       is it lost: the run begins again from a checkpoint

Records of groups that are dropped are not copied: nobody opens them again. In a run that has no
expendable machine, nothing is copied here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

from gcore_core.contract.errors import WorkerDied
from gcore_core.contract.records import Header, Ref
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.lost_nodes import refs_of
from gcore_core.runtime.messages import KEEP, RELEASE, KeepRequest, ReleaseRequest
from gcore_core.runtime.rpc.retry import LOST, PATIENT, insist

_OWNER = "kept"  # under which name copies are released


class Keeping:
    """Copies a shard's records to the machines that keep them."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._lost = context.lost

    async def keep(self, step: int, headers: Iterable[Header]) -> None:
        """Has the records' headers name copies on machines that are not expendable.

        Returns when each has one, or lies on a machine that is lost (``LostNodes.holds``): such
        headers stay as they are.

        step: up to which the copies are needed.
        """
        if not self._context.keepers:
            return
        at_risk = [h for h in headers if any(self._lost.may_lose(ref) for ref in refs_of(h))]
        # (keeper, node) -> what the keeper copies from the node, each chunk once and in order
        wanted: dict[tuple[int, str], dict[Ref, None]] = defaultdict(dict)
        for header in at_risk:
            for ref in refs_of(header):
                if self._lost.may_lose(ref):
                    wanted[self._keeper(header), ref.node][ref] = None
        copies: dict[tuple[int, Ref], Ref] = {}  # (keeper, reference) -> the copy's reference

        async def copy(keeper: int, node: str, refs: Sequence[Ref]) -> None:
            # Not strict: there are no copies from a node that is lost.
            for ref, kept in zip(refs, await self._copies(step, keeper, node, refs), strict=False):
                copies[keeper, ref] = kept

        await asyncio.gather(*(copy(*place, list(refs)) for place, refs in wanted.items()))
        for header in at_risk:
            keeper = self._keeper(header)
            if header.columns is not None:
                header.columns = copies.get((keeper, header.columns), header.columns)
            header.media = {
                name: copies.get((keeper, ref), ref) for name, ref in header.media.items()
            }

    def _keeper(self, header: Header) -> int:
        """Returns the number of the machine that keeps a record; those of a group stay together."""
        return header.ordinal % len(self._context.keepers)

    async def _copies(self, step: int, keeper: int, node: str, refs: Sequence[Ref]) -> list[Ref]:
        """Returns the copies of what one machine has; none when it is lost."""
        agent = self._context.keepers[keeper]
        request = KeepRequest({self._context.facts.shard: step}, list(refs))

        async def ask(attempt: int) -> list[Ref]:
            call = agent.call(KEEP, request)
            return await self._lost.unless_lost(node, call, node)

        try:
            return await PATIENT.run(ask, LOST)
        except WorkerDied:
            if node in self._lost.names():
                return []
            raise


async def release_kept(context: ControllerContext, before: int) -> None:
    """Gives back the copies of steps before ``before``, of all shards; only the lead calls it."""
    released = dict.fromkeys(range(context.facts.shards), (0, before))
    request = ReleaseRequest(_OWNER, released)
    await asyncio.gather(*(insist(agent, RELEASE, request) for agent in context.keepers))
