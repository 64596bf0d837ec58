"""Has leases drawn by replicas; each finished record goes on to the scorers at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
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
from gcore_core.runtime.messages import GIVE_BACK, GiveBack
from gcore_core.runtime.rpc.retry import LOST, PATIENT


class Drawing:
    """Has a shard's leases drawn and scored."""

    def __init__(self, context: ControllerContext, placement: PlacementShard) -> None:
        self._context = context
        self._placement = placement
        self._working = set[Lanes]()  # the waves that are being drawn
        self._gave_back = 0  # in waves that are over
        self._gate = Gate()

    @property
    def gave_back(self) -> int:
        """How many samples replicas have given back so far for others to go on with at once."""
        return self._gave_back + sum(lanes.gave_back for lanes in self._working)

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
        fixed = facts.run.deterministic or len(replicas) == 1
        scoring = Scoring(self._context, ledger, round_.purpose, self._placement)
        scoring.add(list(unscored))
        lanes = deal(leases, len(replicas), shard, shards, fixed)
        ordinals = [lease.ordinal for lease in leases]
        told = self._context, self._placement, ledger, round_, scoring, self._gate
        try:
            with self._working_off(Lanes(*told, fixed)) as work:
                await work.work_off(replicas, lanes)
            await self._placement.judging()
            await scoring.finish()
            while lost := ledger.forget(self._context.lost.holds, ordinals):
                # Every replica has its part of the round, so none waits for another shard's.
                lanes = deal(lost, len(replicas), shard, shards, False)
                with self._working_off(Lanes(*told, False)) as work:
                    await work.work_off(replicas, lanes)
                await scoring.finish()
        finally:
            scoring.cancel()

    def lend(self) -> None:
        """Gives replicas that have woken what waits in the waves that are being drawn."""
        for lanes in self._working:
            lanes.lend(self._placement.loans.awake())

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
                await replica.call(GIVE_BACK, GiveBack(1.0))
            await asyncio.sleep(PATIENT.pause_s(asked))
            asked += 1

    def go_on(self) -> None:
        """Lets replicas go on after ``pause``; without one before it does nothing."""
        self._gate.open()

    @contextlib.contextmanager
    def _working_off(self, lanes: Lanes) -> Iterator[Lanes]:
        self._working.add(lanes)
        try:
            yield lanes
        finally:
            self._working.discard(lanes)
            self._gave_back += lanes.gave_back
