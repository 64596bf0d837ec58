"""Lets replicas sample leases, and sends each finished record to the scorers.

The leases of a round are cut into parts. Each lane gives its replica one part after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass

from gcore_core.contract.errors import (
    DeadlineExceeded,
    WeightMismatch,
    WeightsBehind,
    WeightsGone,
    WorkerDied,
)
from gcore_core.contract.launching import Peer
from gcore_core.contract.lineage import UNSEALED, name_of
from gcore_core.contract.records import UNSAMPLED, Header, Lease
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.generation.scoring import Scoring
from gcore_core.controllers.generation.split_requests import deal, owned_by
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.runtime.messages import CATCH_UP, GENERATE, CatchUp, GenerateRequest
from gcore_core.wire.retry import PATIENT, insist


@dataclass(frozen=True, kw_only=True)
class Round:
    """Says what leases are sampled for. A round is what a step or an evaluation issues at once.

    version: the oldest version of the weights that may begin a sample; in a deterministic run the
        only one that may draw it. By it the records' memory is held and released: it is the step
        that uses them, unless generation runs ahead.
    number: counts the rounds of a version.
    purpose: TRAIN, GREEDY or SAMPLED.
    """

    version: int
    number: int
    purpose: str


class Lanes:
    """Samples the leases of a round: each lane gives its replica one part after the other.

    scoring: gets every finished record.
    placement: says who is awake of the roles that episodes ask.
    replicas: all that the round is dealt over.
    """

    def __init__(
        self,
        context: ControllerContext,
        ledger: Ledger,
        round_: Round,
        scoring: Scoring,
        placement: PlacementShard,
        replicas: list[Peer],
    ) -> None:
        self._context = context
        self._ledger = ledger
        self._round = round_
        self._scoring = scoring
        self._placement = placement
        self._replicas = replicas

    async def work_off(self, lanes: list[tuple[int, deque[list[Lease]]]]) -> None:
        """Works off all lanes at once; the first failure ends all.

        lanes: number of a replica, and its queue, which lanes may share.
        """
        tasks = [
            asyncio.ensure_future(self._work_off(number, waiting)) for number, waiting in lanes
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _work_off(self, number: int, waiting: deque[list[Lease]]) -> None:
        """Gives one lane's replica one part after the other.

        number: of the replica.
        waiting: the parts; other lanes may take from them, too.

        What the replica does not finish goes back into the queue; another lane may take it
        meanwhile. A replica that is behind gets its weights from the lead, then its next part.
        Another one stands in for it where it was started again, and nobody has the weights for it
        under which the round is to be sampled.

        Raises WeightsGone where no replica holds these weights. Raises WorkerDied,
        DeadlineExceeded or WeightsBehind, whichever came last, when parts have failed by these
        ``PATIENT.tries`` times together.
        """
        failures = 0
        newer = set[str]()  # replicas that hold newer weights than the round is for
        while waiting:
            replica = self._replica_of(number, newer)
            leases = waiting.popleft()
            try:
                await self._draw_part(replica, leases)
            except WeightsGone as error:
                error.where = replica.name
                newer.add(replica.name)
                if not self._holding(newer):
                    raise
                waiting.append(self._ledger.take_back(leases))
            except (WorkerDied, DeadlineExceeded, WeightsBehind) as error:
                unfinished = self._ledger.take_back(leases)
                # An empty part is sent again, too: other shards' parts of the round wait for it.
                if unfinished or not leases:
                    waiting.append(unfinished)
                failures += 1
                if failures == PATIENT.tries:
                    raise
                if isinstance(error, WeightsBehind):
                    catch_up = CatchUp(replica.name, self._round.version)
                    await insist(self._context.lead, CATCH_UP, catch_up)
                else:
                    await asyncio.sleep(PATIENT.pause_s(failures))

    def _replica_of(self, number: int, newer: Set[str]) -> Peer:
        """Returns the lane's replica, or the one that stands in for it.

        newer: names of replicas that hold newer weights than the round is for.
        """
        replica = self._replicas[number]
        if replica.name not in newer:
            return replica
        holding = self._holding(newer)
        return holding[number % len(holding)]

    def _holding(self, newer: Set[str]) -> list[Peer]:
        return [one for one in self._replicas if one.name not in newer]

    async def _draw_part(self, replica: Peer, leases: list[Lease]) -> None:
        """Draws one part.

        Raises WorkerDied or DeadlineExceeded when the replica is lost on the way; WeightsBehind
        when it must have a push first, as after a restart; where only one version may draw,
        WeightsGone when it holds a newer one.
        """
        facts = self._context.facts
        round_ = self._round
        ledger = self._ledger
        request = GenerateRequest(
            round_.version,
            round_.number,
            facts.shard,
            round_.purpose,
            leases,
            least=round_.version,
            exact=facts.run.deterministic,
            awake=self._placement.awake.judges(),
            awake_version=self._placement.awake.version,
        )
        sent_s = asyncio.get_running_loop().time()
        stream = replica.stream(GENERATE, request)
        async with contextlib.aclosing(stream):
            async for came in stream:
                check_versions(came, round_, replica.name)
                if request.exact:
                    check_repeats(came, round_, replica.name)
                fresh = [header for header in came if ledger.finished(header)]
                self._context.trace.finished(round_.version, replica.name, sent_s, fresh)
                self._scoring.add(fresh)


def check_versions(headers: Iterable[Header], round_: Round, replica: str) -> None:
    """Raises WeightMismatch when a record claims a last version older than ``Round.version``.

    A generator that is behind takes a push before it begins, so it held newer weights and the
    version that it claims is wrong. Such a record would pass for a stale one, whose log-probs
    nothing compares. Generators that no push has reached are left out.
    """
    for header in headers:
        if header.stamp == UNSEALED or header.versions[1] >= round_.version:
            continue
        raise WeightMismatch(
            f"{replica} says that version {header.versions[1]} sampled record "
            f"{name_of(*header.key)}, and it holds version {round_.version} or a later one",
            where=f"step {round_.version}",
            why="it was brought to that version before it began: the number that it gives its "
            "records is behind the weights that it holds",
            todo="look at how the generator counts versions: a push says which one it brings",
            ordinal=header.ordinal,
            sample=header.sample,
            replica=header.replica,
        )


def check_repeats(headers: Iterable[Header], round_: Round, replica: str) -> None:
    """Raises WeightsGone when newer weights sampled a record than a run that repeats would have.

    In a deterministic run ``Round.version`` is not only the oldest version that may begin a sample:
    it is the version that samples it, from its first action to its last. Generators that no push
    has reached are left out, and so are records that were read and not sampled.
    """
    for header in headers:
        if header.stamp == UNSEALED or set(header.versions) <= {round_.version, UNSAMPLED}:
            continue
        first, last = header.versions
        drew = f"version {last}" if first == last else f"versions {first} to {last}"
        raise WeightsGone(
            f"{drew} sampled record {name_of(*header.key)}, and version {round_.version} "
            "would have in an undisturbed run",
            where=replica,
            why="this run is to repeat (run.deterministic)",
            todo="the run goes on from its newest checkpoint; where it has none, set "
            "checkpoint.every",
            version=round_.version,
            held=last,
        )


async def draw(
    context: ControllerContext,
    placement: PlacementShard,
    ledger: Ledger,
    round_: Round,
    leases: list[Lease],
) -> None:
    """Samples and scores the leases; returns when every record is finished and scored.

    A replica gets the next part when it has finished one. In a deterministic run each ordinal has
    its replica, and a replica waits for a request from every shard before it begins. Raises
    WorkerDied or DeadlineExceeded when a replica is lost too often (``Lanes``).
    """
    facts = context.facts
    replicas = await placement.sampling()
    shard = facts.shard
    shards = facts.shards
    if facts.owns_replicas:
        replicas = [replicas[i] for i in owned_by(shard, shards, len(replicas))]
        shard = 0  # alone with its own
        shards = 1
    gathers = facts.run.deterministic
    scoring = Scoring(context, ledger, round_.purpose, placement)
    lanes = deal(leases, len(replicas), shard, shards, gathers or len(replicas) == 1)
    try:
        await Lanes(context, ledger, round_, scoring, placement, replicas).work_off(lanes)
        await placement.judging()
        await scoring.finish()
    finally:
        scoring.cancel()
