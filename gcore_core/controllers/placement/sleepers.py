"""Who is asleep: generators that another one, or the trainer, leaves no memory for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from gcore_core.contract.errors import WorkerDied
from gcore_core.contract.launching import ALIVE, Endpoint, Peer, Reply, Request
from gcore_core.runtime.messages import SLEEP, WAKE, Nothing, SleepRequest
from gcore_core.runtime.rpc.retry import insist

ANSWER_S = 2.0
Replica = tuple[str, int]  # role, number


class Sleepers:
    """The lead's. able: roles whose backend can sleep; of others, those that should are only not
    asked. resting: those of them that sleep while the trainer works. moved: how many woke that
    another role had put to sleep. rest_s: what the latest rest took. lost: who is not asked, since
    nobody answers there.
    """

    def __init__(
        self, peers: Mapping[str, Sequence[Peer]], able: Collection[str], resting: Collection[str]
    ) -> None:
        self._peers, self._able, self._resting = peers, set(able), set(resting)
        self._asleep: dict[str, set[int]] = {role: set() for role in peers}
        self._rested = set[Replica]()
        self._release_before = 0
        self.moved = 0
        self.rest_s = 0.0
        self.lost = set[Replica]()

    async def rest(self) -> None:
        """The rollout is over: the trainer gets the memory."""
        every = {role: set(range(len(peers))) for role, peers in self._peers.items()}
        awake = {
            role: set() if role in self._resting else every[role] - self._asleep[role]
            for role in every
        }
        self._rested = {
            (role, i) for role in every for i in every[role] - self._asleep[role] - awake[role]
        }
        self.rest_s = await self.arrange(awake)

    async def arrange(self, awake: Mapping[str, Collection[int]], release_before: int = 0) -> float:
        """Those that sleep give their memory back before others take it, and their records of steps
        before ``release_before``, of which no push will tell them. Returns the seconds that it
        took.
        """
        sleep, wake = [], []
        news, self._release_before = (
            release_before > self._release_before,
            max(release_before, self._release_before),
        )
        for role, peers in self._peers.items():
            before, asleep = self._asleep[role], set(range(len(peers))) - set(awake[role])
            sleep += [(role, i) for i in sorted(asleep if news else asleep - before)]
            wake += [(role, i) for i in sorted(before - asleep)]
            self._asleep[role] = asleep
        self.moved += sum(one[0] in self._able for one in set(wake) - self._rested)
        self._rested -= set(wake)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        asked = await self._ask(sleep, SLEEP, SleepRequest(self._release_before))
        asked += await self._ask(wake, WAKE, Nothing())
        return clock() - began_s if asked else 0.0

    async def gone(self, whom: Collection[Replica]) -> set[Replica]:
        """Those of them whose process does not answer, perhaps because it only starts."""

        async def answers(role: str, i: int) -> bool:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._peers[role][i].call(ALIVE, None)
            except (WorkerDied, TimeoutError):
                return False
            return True

        answered = await asyncio.gather(*(answers(*one) for one in whom))
        return {one for one, is_there in zip(whom, answered, strict=True) if not is_there}

    async def _ask(
        self, whom: list[Replica], endpoint: Endpoint[Request, Reply], request: Request
    ) -> int:
        """How many of them can do it."""
        peers = [
            self._peers[one[0]][one[1]]
            for one in whom
            if one[0] in self._able and one not in self.lost
        ]
        await asyncio.gather(*(insist(peer, endpoint, request) for peer in peers))
        return len(peers)
