"""Rewarding: records go to the scorers as they are finished, those that end close together in one
request.
"""

from __future__ import annotations

import asyncio

from gcore_core.contract.launching import Peer
from gcore_core.contract.records import FAILED, REWARD_FAILED, Header, RecordScore
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.runtime.messages import SCORE, TRAIN, ScoreRequest
from gcore_core.runtime.rpc.retry import insist_anew

WAIT_S = 0.005  # for others: a request costs as much as what is to be done for twenty records
MOST = 64  # records of a request: a reward's time limit is for all of them


class Scoring:
    """The records of one draw."""

    def __init__(
        self, context: ControllerContext, ledger: Ledger, purpose: str, placement: PlacementShard
    ) -> None:
        self._context, self._ledger, self._purpose = context, ledger, purpose
        self._placement = placement
        self._open = asyncio.Event()  # shut while judges sleep
        if not placement.awake.in_turns:
            self._open.set()
        self._tasks = set[asyncio.Task[None]]()
        self._names = set(context.facts.rewards)
        self._of_groups = set(context.facts.of_groups)
        self._waiting: list[Header] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, headers: list[Header]) -> None:
        """Has these scored by the rewards that see one record and, where they are the last of a
        group, by those that see the group.
        """
        if not headers:
            return
        if self._task is None or len(self._waiting) + len(headers) > MOST:
            self._waiting = []
            self._task = asyncio.ensure_future(self._score(self._waiting))
            self._tasks.add(self._task)
        # The task that was begun waits a moment and takes all that has come until then.
        self._waiting += headers

    async def finish(self) -> None:
        """Nothing more comes, and judges are awake: returns when everything is scored, or raises
        what failed.
        """
        self._open.set()
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _score(self, headers: list[Header]) -> None:
        await asyncio.sleep(WAIT_S)
        if headers is self._waiting:
            self._task = None
        await self._open.wait()
        work = [
            (
                [header for header in headers if header.status != FAILED],
                self._names - self._of_groups,
            )
        ]
        if self._of_groups:
            groups = [
                self._ledger.whole(ordinal)
                for ordinal in dict.fromkeys(header.ordinal for header in headers)
            ]
            work.append((self._usable(groups), self._of_groups))
        scorers = self._context.scorers
        asks = (
            (peer, part, rewards.intersection(hosted))
            for part, rewards in work
            for peer, hosted in scorers
        )
        await asyncio.gather(
            *(self._ask(peer, part, wanted) for peer, part, wanted in asks if part and wanted)
        )

    def _usable(self, groups: list[list[Header]]) -> list[Header]:
        """The records of whole groups; where one has failed, the rewards of the others have too."""
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

    async def _ask(self, peer: Peer, headers: list[Header], rewards: set[str]) -> None:
        names = sorted(rewards)
        scores = await insist_anew(
            peer, SCORE, lambda: _request(self._placement, self._purpose, headers, names)
        )
        for score in scores:
            self._ledger.scored(score, self._names)
        self._context.trace.scored(scores)


async def route_judges(context: ControllerContext, placement: PlacementShard) -> None:
    """Tells all that ask judges who is awake now."""

    async def tell(peer: Peer, hosted: list[str]) -> None:
        await insist_anew(peer, SCORE, lambda: _request(placement, TRAIN, [], hosted))

    await asyncio.gather(*(tell(peer, hosted) for peer, hosted in context.scorers))


def _request(
    placement: PlacementShard, purpose: str, headers: list[Header], rewards: list[str]
) -> ScoreRequest:
    """Names those who are awake at the time at which it is made."""
    awake = placement.awake
    return ScoreRequest(purpose, headers, rewards, awake.judges(), awake.version)
