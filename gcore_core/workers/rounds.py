"""Gathers what each shard wants drawn until all shards have asked: together that is a round."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from gcore_core.contract.records import Lease
from gcore_core.runtime.messages import GenerateRequest


@dataclass
class _JoinedRound:
    """Holds what all shards ask of one round.

    parts: shard -> the leases that it asked for.
    complete: set when every shard has asked.
    submitted: whether the engine has been given the round.
    """

    parts: dict[int, list[Lease]] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: bool = False


class Rounds:
    """Joins the shards' parts of a round, so that the engine sees one batch whatever their number.

    shards: how many shards make a round whole.
    gather_s: seconds for which a part waits for the others. None: until all are there; a run that
        is to repeat bit for bit needs that.
    restarted: whether this process took the place of one that ended. Shards that had their answers
        from that one do not ask again. So no part waits in the step of the first request.
    """

    def __init__(self, shards: int, gather_s: float | None, restarted: bool) -> None:
        self._shards = shards
        self._gather_s = gather_s
        self._restarted = restarted
        self._skips_waiting_in = -1  # step of the first request to a restarted process
        self._rounds: dict[tuple[int, int, str], _JoinedRound] = {}  # by step, round, purpose

    async def join(self, request: GenerateRequest) -> list[Lease]:
        """Returns the leases to submit because of this request, by ordinal.

        The first request that ends its wait gets all parts that have come; the caller submits them
        to the engine. A later or a repeated request gets only its own leases. Some of them may have
        been submitted with the first: ``DrawnRecords.begin`` leaves out what runs or is finished.
        """
        if self._restarted:
            self._restarted = False
            self._skips_waiting_in = request.step
        key = request.step, request.round, request.purpose
        group = self._rounds.setdefault(key, _JoinedRound())
        # A late request is noted too: ``shards_of`` must know every shard that needs the records.
        group.parts.setdefault(request.shard, []).extend(request.leases)
        if len(group.parts) == self._shards:
            group.complete.set()
        elif not (group.submitted or request.step == self._skips_waiting_in):
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
        """Returns the shards that have asked for at least one record of a step."""
        parts = [group.parts.items() for key, group in self._rounds.items() if key[0] == step]
        return frozenset(shard for part in parts for shard, leases in part if leases)

    def forget(self, before: int) -> None:
        """Drops the rounds of steps before ``before``."""
        self._rounds = {key: group for key, group in self._rounds.items() if key[0] >= before}
