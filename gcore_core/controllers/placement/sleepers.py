"""Puts generators to sleep while others or the trainer need their memory, and wakes them.

Trainers sleep while generators sample; whatever they are asked next wakes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from gcore_core.contract.errors import WorkerDied
from gcore_core.contract.launching import ALIVE, Endpoint, Peer, Reply, Request
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import SLEEP, TRAINER_SLEEP, WAKE, Nothing, SleepRequest
from gcore_core.wire.retry import insist

ANSWER_S = 2.0  # deadline for a replica to say that it is alive
Replica = tuple[str, int]  # role, number of the replica


class Sleepers:
    """Puts replicas to sleep and wakes them, and knows which ones sleep; used by the lead alone.

    peers: generator role -> all its replicas.
    able: roles whose backend can sleep. Replicas of other roles that should sleep stay awake; they
        just get no requests.
    asleep_in_training: roles of ``able`` that sleep while the trainer works.
    moved: how many replicas woke that had slept for the sake of another role; the lead begins at 0
        with each decision.
    sleep_s: seconds that it took to put replicas to sleep when the latest rollout was over.
    lost: replicas that do not answer, so they are asked neither to sleep nor to wake.
    """

    def __init__(
        self,
        peers: Mapping[str, Sequence[Peer]],
        able: Collection[str],
        asleep_in_training: Collection[str],
    ) -> None:
        self._peers = peers
        self._able = set(able)
        self._asleep_in_training = set(asleep_in_training)
        self._asleep: dict[str, set[int]] = {role: set() for role in peers}
        self._slept = set[Replica]()
        self._release_before = 0
        self.moved = 0
        self.sleep_s = 0.0
        self.lost = set[Replica]()

    async def sleep(self) -> None:
        """Puts roles to sleep after a rollout: the trainer gets their memory."""
        every = {role: set(range(len(peers))) for role, peers in self._peers.items()}
        awake = {
            role: set() if role in self._asleep_in_training else every[role] - self._asleep[role]
            for role in every
        }
        self._slept = {
            (role, i) for role in every for i in every[role] - self._asleep[role] - awake[role]
        }
        self.sleep_s = await self.arrange(awake)

    async def arrange(self, awake: Mapping[str, Collection[int]], release_before: int = 0) -> float:
        """Wakes the replicas of ``awake`` and puts all others to sleep; returns the seconds.

        Replicas go to sleep before others wake, so that those find the memory free. Returns 0.0
        when no replica had to be asked.

        awake: role -> the numbers of the replicas that are to be awake.
        release_before: no record of earlier steps is needed. Replicas that are awake learn it from
            the push. One that sleeps gets no push, so it is asked to sleep again whenever this
            number has grown, and learns it from that.
        """
        sleep = []
        wake = []
        news = release_before > self._release_before
        self._release_before = max(release_before, self._release_before)
        for role, peers in self._peers.items():
            before = self._asleep[role]
            asleep = set(range(len(peers))) - set(awake[role])
            sleep += [(role, i) for i in sorted(asleep if news else asleep - before)]
            wake += [(role, i) for i in sorted(before - asleep)]
            self._asleep[role] = asleep
        self.moved += len(set(self._able_and_present(wake)) - self._slept)
        self._slept -= set(wake)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        n_requests = await self._send_to_able(sleep, SLEEP, SleepRequest(self._release_before))
        n_requests += await self._send_to_able(wake, WAKE, Nothing())
        return clock() - began_s if n_requests else 0.0

    async def find_lost(self, replicas: Collection[Replica]) -> set[Replica]:
        """Returns the replicas whose process does not answer within ``ANSWER_S``.

        The process may have ended, or it may be starting.
        """

        async def answers(role: str, i: int) -> bool:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._peers[role][i].call(ALIVE, None)
            except (WorkerDied, TimeoutError):
                return False
            return True

        answered = await asyncio.gather(*(answers(*one) for one in replicas))
        return {one for one, is_there in zip(replicas, answered, strict=True) if not is_there}

    async def _send_to_able(
        self, replicas: list[Replica], endpoint: Endpoint[Request, Reply], request: Request
    ) -> int:
        """Sends a request to the replicas that can sleep and are not lost; returns their number."""
        peers = [self._peers[role][i] for role, i in self._able_and_present(replicas)]
        await asyncio.gather(*(insist(peer, endpoint, request) for peer in peers))
        return len(peers)

    def _able_and_present(self, replicas: Collection[Replica]) -> list[Replica]:
        return [one for one in replicas if one[0] in self._able and one not in self.lost]


async def sleep_trainers(context: ControllerContext) -> dict[str, float]:
    """Puts every rank of every trainer to sleep, where ``placement.sleep_in_rollout`` says so.

    Shards may all call it; the lead alone asks. No push may be under way, since it needs trainers
    awake.

    Returns in the lead the seconds of the slowest rank: ``trainer_sleep_s`` of this sleep and
    ``trainer_wake_s`` of the wake before it.
    """
    if not context.facts.trainers_sleep or not context.agree.lead:
        return {}
    workers = [peer for role in context.trained for peer in context.workers_of(role)]
    slept = await asyncio.gather(*(insist(peer, TRAINER_SLEEP, Nothing()) for peer in workers))
    return {
        "trainer_sleep_s": max(rank.sleep_s for rank in slept),
        "trainer_wake_s": max(rank.wake_s for rank in slept),
    }
