"""Sends finished records to the scorers.

Records that finish close together go in one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gcore_core.contract.launching import Peer
from gcore_core.contract.records import FAILED, REWARD_FAILED, Header, RecordScore
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.runtime.messages import SCORE, TRAIN, ScoreRequest
from gcore_core.wire.retry import insist_with

# Seconds for which a request waits for further records. Sending a request costs as much as the work
# for twenty records.
WAIT_S = 0.005
# A request that waits takes further records only up to this many in all. More that have come at
# once still go together. A reward's time limit counts for all records of a request together.
MOST = 64


class Scoring:
    """Sends the records of one draw to the rewards, and gives the scores to the ledger."""

    def __init__(
        self, context: ControllerContext, ledger: Ledger, purpose: str, placement: PlacementShard
    ) -> None:
        self._context = context
        self._ledger = ledger
        self._purpose = purpose
        self._placement = placement
        self._open = asyncio.Event()  # shut while judges sleep
        if not placement.awake.in_turns:
            self._open.set()
        self._tasks = set[asyncio.Task[None]]()
        self._names = set(context.facts.rewards)
        self._of_groups = set(context.facts.of_groups)  # the rewards that see a whole group
        self._asked: set[int] = set()  # groups that the group rewards were sent
        self._waiting: list[Header] = []  # the records of the latest request
        # The task that will send ``_waiting``. None when that request takes no more records.
        self._task: asyncio.Task[None] | None = None

    def add(self, headers: list[Header]) -> None:
        """Sends these records to the rewards that see one record.

        When a record completes its group, the rewards that see whole groups score the group.
        """
        if not self._names:  # a run without rewards: nothing is waited for
            for header in headers:
                self._ledger.scored(RecordScore(*header.key, {}, {}), self._names)
            return
        if not headers:
            return
        if self._task is None or len(self._waiting) + len(headers) > MOST:
            self._waiting = []
            self._task = asyncio.ensure_future(self._score(self._waiting))
            self._tasks.add(self._task)
        # The task waits and then sends this very list, so what is added until then goes
        # with it.
        self._waiting += headers

    async def finish(self) -> None:
        """Returns when everything that was added is scored; raises what failed.

        It is called when the judges are awake and all parts of a round are worked off.
        """
        self._open.set()
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """Cancels the requests that run. After ``finish`` it does nothing."""
        for task in self._tasks:
            task.cancel()

    async def _score(self, headers: list[Header]) -> None:
        """Waits for further records, then has these and the groups that they complete scored.

        headers: a list that ``add`` may still add to while this waits.
        """
        await asyncio.sleep(WAIT_S)
        if headers is self._waiting:  # else ``add`` has begun another list meanwhile
            self._task = None
        await self._open.wait()
        work = [
            (
                [header for header in headers if header.status != FAILED],
                self._names - self._of_groups,
            )
        ]
        if self._of_groups:
            ordinals = dict.fromkeys(header.ordinal for header in headers)
            work.append((self._usable(self._completed(ordinals)), self._of_groups))
        scorers = self._context.scorers
        shares = (
            (peer, part, rewards.intersection(hosted))
            for part, rewards in work
            for peer, hosted in scorers
        )
        await asyncio.gather(
            *(self._score_on(peer, part, names) for peer, part, names in shares if part and names)
        )

    def _completed(self, ordinals: Iterable[int]) -> list[list[Header]]:
        """Returns the groups that are complete and that the group rewards were not sent yet.

        Records of one group may be in several requests. It may be complete before the first of
        these is sent, as where judges sleep until the last record has come. The first one takes it.

        ordinals: the groups of a request's records.
        """
        completed = []
        for ordinal in ordinals:
            group = self._ledger.whole(ordinal)
            if group and ordinal not in self._asked:
                self._asked.add(ordinal)
                completed.append(group)
        return completed

    def _usable(self, groups: list[list[Header]]) -> list[Header]:
        """Returns the records of the groups in which no record has failed.

        For every record of any other group, the ledger gets failed group rewards.
        """
        usable: list[Header] = []
        for group in groups:
            if any(header.status == FAILED for header in group):
                for header in group:
                    statuses = dict.fromkeys(self._of_groups, REWARD_FAILED)
                    score = RecordScore(
                        *header.key, {}, statuses, "another record of the group failed"
                    )
                    self._ledger.scored(score, self._names)
            else:
                usable += group
        return usable

    async def _score_on(self, peer: Peer, headers: list[Header], rewards: set[str]) -> None:
        """Asks one scorer for these rewards of the records, and gives the scores to the ledger."""
        names = sorted(rewards)

        def request() -> ScoreRequest:
            return _request(self._placement, self._purpose, headers, names)

        scores = await insist_with(peer, SCORE, request)
        for score in scores:
            self._ledger.scored(score, self._names)
        self._context.trace.scored(scores)


async def route_judges(context: ControllerContext, placement: PlacementShard) -> None:
    """Tells every scorer worker which judges are awake now.

    A request without records does it, since every request names the awake judges.
    """

    async def tell(peer: Peer, hosted: list[str]) -> None:
        await insist_with(peer, SCORE, lambda: _request(placement, TRAIN, [], hosted))

    await asyncio.gather(*(tell(peer, hosted) for peer, hosted in context.scorers))


def _request(
    placement: PlacementShard, purpose: str, headers: list[Header], rewards: list[str]
) -> ScoreRequest:
    """Makes a request that names the judges that are awake at this moment.

    A repeated request is made again, because who is awake may have changed.
    """
    awake = placement.awake
    return ScoreRequest(purpose, headers, rewards, awake.judges(), awake.version)
