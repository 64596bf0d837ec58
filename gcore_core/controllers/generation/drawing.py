"""Has leases drawn by replicas; each finished record goes on to the scorers at once."""

from __future__ import annotations

from dataclasses import replace

from gcore_core.contract.records import Lease
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.generation.dispatch import Lanes, Round
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.generation.scoring import Scoring
from gcore_core.controllers.generation.split_requests import deal, owned_by
from gcore_core.controllers.generation.waves import next_leases
from gcore_core.controllers.placement.shard import PlacementShard


class Drawing:
    """Has a shard's leases drawn and scored."""

    def __init__(self, context: ControllerContext, placement: PlacementShard) -> None:
        self._context = context
        self._placement = placement

    async def draw(self, ledger: Ledger, round_: Round, leases: list[Lease]) -> None:
        """Has the leases drawn and scored; returns when every record is finished and scored.

        Where a group is drawn in waves, the next wave begins when all of these groups have been
        scored so far. Every shard makes the same number of waves, with or without records in them.
        """
        count = len(ledger.waves)
        for wave in range(count):
            if wave:
                leases = next_leases(self._context, ledger, leases, wave)
            number = round_.number * count + wave
            await self._draw_wave(ledger, replace(round_, number=number), leases)

    async def _draw_wave(self, ledger: Ledger, round_: Round, leases: list[Lease]) -> None:
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
        lanes = deal(leases, len(replicas), shard, shards, gathers or len(replicas) == 1)
        try:
            await Lanes(self._context, ledger, round_, scoring).work_off(replicas, lanes)
            await self._placement.judging()
            await scoring.finish()
        finally:
            scoring.cancel()
