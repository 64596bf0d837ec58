"""Has leases drawn by replicas; each finished record goes on to the scorers at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gcore_core.contract.launching import Peer
from gcore_core.contract.records import Header, Lease
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.window.dealing import deal, owned_by
from gcore_core.controllers.window.lanes import Gate, Lanes, Round
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.controllers.window.scoring import Scoring
from gcore_core.controllers.window.waves import next_leases
from gcore_core.runtime.messages import GIVE_BACK, Nothing
from gcore_core.runtime.rpc.retry import LOST, PATIENT


class Drawing:
    """Has a shard's leases drawn and scored."""

    def __init__(self, context: ControllerContext, placement: PlacementShard) -> None:
        self._context = context
        self._placement = placement
        self._gate = Gate()

    async def draw(
        self,
        ledger: Ledger,
        round_: Round,
        leases: list[Lease],
        unscored: Sequence[Header] = (),
    ) -> None:
        """Has the leases drawn and scored; returns when every record is finished and scored.

        unscored: finished records of a group that is drawn all at once, to be scored as well.

        Where a group is drawn in waves, the next wave begins when all of these groups have been
        scored so far. Every shard makes the same number of waves, with or without records in them.
        """
        count = len(ledger.waves)
        for wave in range(count):
            if wave:
                leases = next_leases(self._context, ledger, leases, wave)
            number = round_.number * count + wave
            await self._draw_wave(ledger, replace(round_, number=number), leases, unscored)

    async def _draw_wave(
        self, ledger: Ledger, round_: Round, leases: list[Lease], unscored: Sequence[Header]
    ) -> None:
        """Has one wave drawn and scored.

        A replica gets the next part when it has finished one. In a deterministic run each ordinal
        has its replica, and a replica waits for a request from every shard before it begins.
        Raises WorkerDied or DeadlineExceeded when a replica is lost too often (``Lanes``).
        """
        facts = self._context.facts
        replicas = await self._placement.sampling()
        shard = facts.shard
        shards = facts.shards
        if facts.owns_replicas:
            replicas = [replicas[i] for i in owned_by(shard, shards, len(replicas))]
            shard = 0  # alone with its own
            shards = 1
        gathers = facts.run.deterministic
        scoring = Scoring(self._context, ledger, round_.purpose, self._placement)
        scoring.add(list(unscored))
        ordinals = [lease.ordinal for lease in leases]

        async def work_off(leases: list[Lease], fixed: bool) -> None:
            lanes = deal(leases, len(replicas), shard, shards, fixed)
            work = Lanes(
                self._context,
                self._placement,
                ledger,
                round_,
                scoring,
                self._gate,
                fixed,
                exact=gathers,
            )
            await work.work_off(replicas, lanes)

        try:
            await work_off(leases, gathers or len(replicas) == 1)
            await self._placement.judging()
            await scoring.finish()
            while lost := ledger.forget(self._context.lost.holds, ordinals):
                # Every replica has its part of the round, so none waits for another shard's.
                await work_off(lost, False)
                await scoring.finish()
        finally:
            scoring.cancel()

    async def pause(self) -> None:
        """Has replicas give back the samples that run; returns when none is being asked.

        What they have goes on after ``go_on``, and until then no further sample begins.
        """
        self._gate.close()
        quiet = asyncio.ensure_future(self._gate.is_quiet.wait())
        asking = [asyncio.ensure_future(self._take_back(one)) for one in self._gate.asked()]
        pending: set[asyncio.Future[Any]] = {quiet, *asking}
        try:
            while not quiet.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (quiet, *asking):
                task.cancel()
            await asyncio.gather(quiet, *asking, return_exceptions=True)

    async def _take_back(self, replica: Peer) -> None:
        """Asks a replica for all samples that run until it has no request left.

        More than once, since a request may be on its way, or its samples not yet with the engine.
        """
        asked = 0
        while self._gate.is_asked(replica):
            # Where the replica is lost, its requests end, and those who wait for them go on.
            with contextlib.suppress(*LOST):
                await replica.call(GIVE_BACK, Nothing())
            await asyncio.sleep(PATIENT.pause_s(asked))
            asked += 1

    def go_on(self) -> None:
        """Lets replicas go on after ``pause``; without one before it does nothing."""
        self._gate.open()
