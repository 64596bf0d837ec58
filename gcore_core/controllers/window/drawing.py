"""Has leases drawn by replicas; each finished record goes on to the scorers at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from gcore_core.contract.errors import DeadlineExceeded, WeightMismatch, WeightsGone, WorkerDied
from gcore_core.contract.launching import Peer
from gcore_core.contract.lineage import UNSEALED, name_of
from gcore_core.contract.records import UNSAMPLED, Header, Lease
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.window.dealing import deal, owned_by
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.controllers.window.scoring import Scoring
from gcore_core.controllers.window.waves import next_leases
from gcore_core.runtime.messages import GENERATE, GenerateRequest
from gcore_core.runtime.rpc.resting import Pace, resting
from gcore_core.runtime.rpc.retry import PATIENT, gone, is_gone


@dataclass(frozen=True, kw_only=True)
class Round:
    """Says what leases are drawn for. A round is what a step or an evaluation issues at once.

    step: the step that will use the records; their memory is held for it. ``RunningWindow`` does
        not know that step yet: it gives the version that begins them, by which it releases them.
    number: counts the rounds of a step. ``Drawing`` gives each wave of a round its own number.
    purpose: TRAIN, GREEDY or SAMPLED.
    least: the oldest version of the weights that may begin a sample; in a deterministic run the
        only one that may draw it.
    """

    step: int
    number: int
    purpose: str
    least: int


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
        Raises WorkerDied or DeadlineExceeded when a replica is lost ``PATIENT.tries`` times.
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
        lanes = deal(leases, len(replicas), shard, shards, fixed)
        ordinals = [lease.ordinal for lease in leases]
        try:
            await self._work_off_all(ledger, replicas, round_, lanes, scoring, fixed)
            await self._placement.judging()
            await scoring.finish()
            while lost := ledger.forget(self._context.lost.holds, ordinals):
                # Every replica has its part of the round, so none waits for another shard's.
                lanes = deal(lost, len(replicas), shard, shards, False)
                await self._work_off_all(ledger, replicas, round_, lanes, scoring, False)
                await scoring.finish()
        finally:
            scoring.cancel()

    async def _work_off_all(
        self,
        ledger: Ledger,
        replicas: list[Peer],
        round_: Round,
        lanes: list[tuple[int, deque[list[Lease]]]],
        scoring: Scoring,
        fixed: bool,
    ) -> None:
        """Works off all lanes at once; the first failure ends all."""
        # Each queue once, since lanes may share one.
        queues = {id(waiting): waiting for _, waiting in lanes}.values()
        parts = [leases for waiting in queues for leases in waiting]
        pace = Pace(sum(len(lease.samples) for leases in parts for lease in leases))
        tasks = [
            asyncio.ensure_future(
                self._work_off(ledger, replicas, replica, round_, waiting, scoring, pace, fixed)
            )
            for replica, waiting in lanes
        ]
        try:
            with resting(pace):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _work_off(
        self,
        ledger: Ledger,
        replicas: list[Peer],
        number: int,
        round_: Round,
        waiting: deque[list[Lease]],
        scoring: Scoring,
        pace: Pace,
        fixed: bool,
    ) -> None:
        """Works off one lane: gives the replica one part after the other.

        What the replica does not finish goes back into the queue. Where its machine is lost or is
        about to leave, or where it was started anew and cannot get the weights that the round is to
        be drawn under, another replica stands in for it. Raises WeightsGone where no replica holds
        these weights.

        number: of the lane's replica, among ``replicas``.
        waiting: the lane's queue of parts, which other lanes may share.
        fixed: the replica waits for a part from every shard, so it gets its part even where its
            machine is about to leave.
        pace: is told of every record that has come.
        """
        lost_nodes = self._context.lost
        lost = 0

        def others() -> list[Peer]:
            return self._placement.replicas

        newer = set[str]()  # replicas that hold newer weights than those of the round
        while waiting:
            replica = lost_nodes.stand_in(replicas, number, others, spares_leaving=not fixed)
            if replica.name in newer:
                holding = self._holding(replicas, newer)
                replica = holding[number % len(holding)]
            leases = waiting.popleft()
            try:
                await self._draw_part(ledger, replica, round_, leases, scoring, pace)
            except WeightsGone as error:
                error.where = replica.name
                newer.add(replica.name)
                if not self._holding(replicas, newer):
                    raise
                waiting.append(ledger.lost(leases))
            except (WorkerDied, DeadlineExceeded) as error:
                unfinished = ledger.lost(leases)
                # An empty part is sent again, too: other shards' parts of the round wait for it.
                if unfinished or not leases:
                    waiting.append(unfinished)
                if is_gone(error):
                    continue
                lost += 1
                if lost == PATIENT.tries:
                    raise
                await asyncio.sleep(
                    PATIENT.pause_s(lost)
                )  # another lane may take the part meanwhile

    def _holding(self, replicas: list[Peer], newer: Set[str]) -> list[Peer]:
        """Returns the replicas that may still hold the weights of a round.

        newer: names of those that are known to hold newer ones.
        """
        is_lost = self._context.lost.has
        return [one for one in replicas if one.name not in newer and not is_lost(one.name)]

    async def _draw_part(
        self,
        ledger: Ledger,
        replica: Peer,
        round_: Round,
        leases: list[Lease],
        scoring: Scoring,
        pace: Pace,
    ) -> None:
        """Draws one part.

        Raises WorkerDied or DeadlineExceeded when the replica is lost on the way, or has been lost
        with what it drew; in a deterministic run WeightsGone when it holds newer weights than those
        that the round is to be drawn under.
        """
        is_lost = self._context.lost.holds
        facts = self._context.facts
        request = GenerateRequest(
            round_.step,
            round_.number,
            facts.shard,
            round_.purpose,
            leases,
            round_.least,
            exact=facts.run.deterministic,
        )
        sent_s = asyncio.get_running_loop().time()
        stream = replica.stream(GENERATE, request)
        async with contextlib.aclosing(stream):
            async for came in stream:
                if any(map(is_lost, came)):
                    raise gone(replica.name)
                check_versions(came, round_, replica.name)
                if request.exact:
                    check_repeats(came, round_, replica.name)
                fresh = [header for header in came if ledger.finished(header)]
                self._context.trace.finished(round_.step, replica.name, sent_s, fresh)
                scoring.add(fresh)
                pace.left -= len(fresh)


def check_versions(headers: Iterable[Header], round_: Round, replica: str) -> None:
    """Raises WeightMismatch when a record claims a last version older than ``Round.least``.

    A generator that is behind takes a push before it begins, so it held newer weights and the
    version that it claims is wrong. Such a record would pass for a stale one, whose log-probs
    nothing compares. Generators that no push has reached are left out.
    """
    for header in headers:
        if header.stamp == UNSEALED or header.versions[1] >= round_.least:
            continue
        raise WeightMismatch(
            f"{replica} says that version {header.versions[1]} sampled record "
            f"{name_of(*header.key)}, and it holds version {round_.least} or a later one",
            where=f"step {round_.step}",
            why="it was brought to that version before it began: the number that it gives its "
            "records is behind the weights that it holds",
            todo="look at how the generator counts versions: a push says which one it brings",
            ordinal=header.ordinal,
            sample=header.sample,
            replica=header.replica,
        )


def check_repeats(headers: Iterable[Header], round_: Round, replica: str) -> None:
    """Raises WeightsGone when newer weights sampled a record than a run that repeats would have.

    In a deterministic run ``Round.least`` is not only the oldest version that may begin a sample:
    it is the version that samples it, from its first action to its last. Generators that no push
    has reached are left out, and so are records that were read and not sampled.
    """
    for header in headers:
        if header.stamp == UNSEALED or set(header.versions) <= {round_.least, UNSAMPLED}:
            continue
        first, last = header.versions
        drew = f"version {last}" if first == last else f"versions {first} to {last}"
        raise WeightsGone(
            f"{drew} sampled record {name_of(*header.key)}, and version {round_.least} would have "
            "in an undisturbed run",
            where=replica,
            why="this run is to repeat (run.deterministic)",
            todo="the run goes on from its newest checkpoint; where it has none, set "
            "checkpoint.every",
            version=round_.least,
            held=last,
        )
