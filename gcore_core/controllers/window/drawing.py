"""Has leases drawn by replicas; each finished record goes on to the scorers at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gcore_core.contract.launching import Peer
from gcore_core.contract.records import Header, Lease
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.window.cuts import Pieces
from gcore_core.controllers.window.dealing import deal, owned_by
from gcore_core.controllers.window.lanes import Gate, Lanes, Round
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.controllers.window.scoring import Scoring
from gcore_core.controllers.window.waves import next_leases
from gcore_core.runtime.messages import GIVE_BACK, Nothing
from gcore_core.runtime.rpc.retry import LOST, PATIENT


def _nothing() -> None:
    pass


class Drawing:
    """Has a shard's leases drawn and scored.

    cuts: pushes come while samples run, so no batch repeats itself.
    pieces: where an earlier run is repeated whose samples were cut: by which pieces they are drawn.
        A piece is begun when its version is ``published``.
    on_rest: called when all that is left of a wave waits for that.
    """

    def __init__(
        self,
        context: ControllerContext,
        placement: PlacementShard,
        *,
        cuts: bool = False,
        pieces: Pieces | None = None,
        on_rest: Callable[[], None] = _nothing,
    ) -> None:
        self._context = context
        self._placement = placement
        self._cuts = cuts
        self._pieces = pieces
        self._on_rest = on_rest
        self._version = context.facts.start_step  # that was published last
        self._newer = asyncio.Event()  # of the next version
        self._awaited = dict[object, int]()  # of each wave that waits: the version it waits for
        self._gate = Gate()

    @property
    def resting(self) -> int:
        """How many waves wait for a version that is not published."""
        return sum(version > self._version for version in self._awaited.values())

    def published(self, version: int) -> None:
        """Has the pieces begun that this version draws."""
        self._version = version
        self._newer.set()
        self._newer = asyncio.Event()

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
        gathers = facts.run.deterministic and not self._cuts
        scoring = Scoring(self._context, ledger, round_.purpose, self._placement)
        scoring.add(list(unscored))
        ordinals = [lease.ordinal for lease in leases]

        async def work_off(leases: list[Lease], fixed: bool, least: int) -> list[Lease]:
            """Has replicas draw; returns the samples that are held for newer weights."""
            lanes = deal(leases, len(replicas), shard, shards, fixed)
            work = Lanes(
                self._context,
                self._placement,
                ledger,
                replace(round_, least=least),
                scoring,
                self._gate,
                fixed,
                exact=gathers or self._pieces is not None,
                alone=self._cuts and facts.run.deterministic,
                pieces=self._pieces,
            )
            await work.work_off(replicas, lanes)
            return work.held

        async def work_off_pieces(leases: list[Lease], pieces: Pieces) -> None:
            held = list(leases)
            while held:
                await self._until(pieces.next_version(held), scoring)
                due, held = pieces.split(held, self._version)
                held += await work_off(due, len(replicas) == 1, self._version)

        try:
            if self._pieces is None:
                await work_off(leases, gathers or len(replicas) == 1, round_.least)
            else:
                await work_off_pieces(leases, self._pieces)
            await self._placement.judging()
            await scoring.finish()
            while lost := ledger.forget(self._context.lost.holds, ordinals):
                # Every replica has its part of the round, so none waits for another shard's.
                if self._pieces is None:
                    await work_off(lost, False, round_.least)
                else:
                    await work_off_pieces(lost, self._pieces)
                await scoring.finish()
        finally:
            scoring.cancel()

    async def _until(self, version: int, scoring: Scoring) -> None:
        """Returns when a version is published.

        Until then the wave rests, with everything scored that is drawn.
        """
        if version <= self._version:
            return
        await scoring.finish()
        wave = object()
        self._awaited[wave] = version
        try:
            self._on_rest()
            while self._version < version:
                await self._newer.wait()
        finally:
            del self._awaited[wave]

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
