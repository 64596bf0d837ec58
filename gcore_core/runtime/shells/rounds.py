"""Rounds: what each shard wants drawn, held until all shards have asked."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from gcore_core.contract.records import Lease
from gcore_core.runtime.messages import GenerateRequest


@dataclass
class _Round:
    """One round.

    parts: shard -> the leases that it asked for.
    complete: set when every shard has asked.
    submitted: the engine has been given the round.
    """

    parts: dict[int, list[Lease]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: bool = False


class Rounds:
    """Joins the shards' parts of a round, so that the engine sees one batch whatever their number.

    shards: how many parts make a round whole.
    gather_s: seconds for which a part waits for the others; None: until all are there, which a run
        needs that is to repeat bit for bit.
    restarted: this process took the place of one that ended. Shards whose requests that one had
        answered do not ask again, so in the step of the first request nobody is waited for.
    """

    def __init__(self, shards: int, gather_s: float | None, restarted: bool) -> None:
        self._shards, self._gather_s, self._restarted = shards, gather_s, restarted
        self._skips_waiting_in = -1  # the step that began with the process before this one
        self._rounds: dict[tuple[int, int, str], _Round] = {}

    async def join(self, request: GenerateRequest) -> list[Lease]:
        """The leases to submit because of this request, by ordinal.

        The first request that ends its wait gets all parts that have come. A request that comes
        later, or again, gets its own: what runs or is finished is not submitted twice.
        """
        if self._restarted:
            self._restarted, self._skips_waiting_in = False, request.step
        key = request.step, request.round, request.purpose
        group = self._rounds.setdefault(key, _Round())
        group.parts.setdefault(request.shard, []).extend(request.leases)
        if len(group.parts) == self._shards:
            group.complete.set()
        elif not group.submitted and request.step != self._skips_waiting_in:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gather_s):
                    await group.complete.wait()
        if group.submitted:
            leases = request.leases
        else:
            group.submitted = True
            leases = [lease for part in group.parts.values() for lease in part]
        return sorted(leases, key=lambda lease: lease.ordinal)

    def shards_of(self, step: int) -> frozenset[int]:
        """The shards that have asked for records of a step."""
        parts = [group.parts.items() for key, group in self._rounds.items() if key[0] == step]
        return frozenset(shard for part in parts for shard, leases in part if leases)

    def forget(self, before: int) -> None:
        """Drops the rounds of steps before ``before``."""
        self._rounds = {key: group for key, group in self._rounds.items() if key[0] >= before}
