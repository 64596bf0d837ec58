"""Who is awake in a rollout: the lead asks the placement policy and moves replicas, and every shard
learns of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from gcore_core.contract.run_files import Record
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.lead import POLICY, Awake, Last, Mover
from gcore_core.controllers.placement.measurements import heard, tell
from gcore_core.controllers.placement.sleepers import Sleepers
from gcore_core.runtime.rpc.service import Peer


class Placing:
    """One shard's view. In a run whose policy moves nothing every replica is awake in every
    rollout.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._agree, self._facts = context.agree, context.facts.placement
        self._peers = {POLICY: context.replicas, **context.judges}
        self.awake = {role: list(range(len(peers))) for role, peers in self._peers.items()}
        self.in_turns = False
        resting = context.facts.resting
        self._sleepers = Sleepers(
            self._peers, resting if self._facts is None else self._facts.sleeps, resting
        )
        moves = self._facts is not None and self._agree.lead
        self._mover = Mover(context, self.awake, self._sleepers) if moves else None
        self._metrics: dict[str, float] = {}
        self._records: list[Record] = []
        self._arranged_s = self._began_s = self._ended_s = 0.0
        self._judging = self._rescued = False

    @property
    def replicas(self) -> list[Peer]:
        """The policy's generators that are awake."""
        return [self._peers[POLICY][i] for i in self.awake[POLICY]]

    def begin(self) -> None:
        """The rollout begins."""
        self._began_s, self._records, self._rescued = asyncio.get_running_loop().time(), [], False

    def end(self, records: Iterable[Record]) -> None:
        """The rollout is over; what was drawn in it."""
        self._ended_s, self._records = asyncio.get_running_loop().time(), list(records)

    async def rest(self) -> None:
        """The rollout is over on all shards: until ``at`` the trainer has the memory of those that
        may sleep.
        """
        if self._agree.lead:
            await self._sleepers.rest()

    async def at(self, step: int, release_before: int) -> None:
        """Decides who is awake in the rollout of ``step``, and has it so. Before the push, which
        only they hear.
        """
        if self._facts is None:
            if self._agree.lead:
                took_s = (
                    await self._sleepers.arrange(self.awake, release_before) + self._sleepers.rest_s
                )
                self._metrics = {"placement/switch_s": took_s} if took_s else {}
            return
        judges, clock = (
            [role for role in self._peers if role != POLICY],
            asyncio.get_running_loop().time,
        )
        trained_s, began_s = clock(), time.perf_counter()
        mine = msgspec.msgpack.encode(tell(self._records, judges, self._began_s))
        took_s = time.perf_counter() - began_s

        async def lead(told: list[bytes]) -> list[bytes]:
            began_s = time.perf_counter()
            rows = [msgspec.msgpack.decode(part, type=tuple[bytes, bytes]) for part in told]
            measured = (
                heard(rows, step - 1, POLICY, judges) if any(sampled for sampled, _ in rows) else {}
            )
            last = Last(
                measured=measured,
                rollout_s=self._ended_s - self._began_s,
                training_s=trained_s - self._ended_s - self._sleepers.rest_s,
                pushing_s=self._began_s - self._arranged_s,
                monitoring_s=took_s + time.perf_counter() - began_s,
            )
            awake = await cast(Mover, self._mover).decide(step, release_before, last)
            return [msgspec.msgpack.encode(awake)] * self._agree.shards

        self._take(
            msgspec.msgpack.decode(await self._agree.ask("placement", mine, lead), type=Awake),
            False,
        )
        self._arranged_s = clock()

    def _take(self, now: Awake, judging: bool) -> None:
        for role, own in now.replicas.items():
            self.awake[role][:] = (
                own  # in place: what waits to be asked, or asked again, names those of now
            )
        self.in_turns, self._judging = now.in_turns, judging

    async def rescue(self) -> bool:
        """All that was issued is drawn, on all shards, and not all is judged: a judge of which
        nobody answers gets cells of the policy, which has nothing to do. Whether that was so in
        this rollout.
        """

        async def lead(_: list[bytes]) -> list[bytes]:
            return [
                msgspec.msgpack.encode(await cast(Mover, self._mover).rescue())
            ] * self._agree.shards

        if self._facts is not None and not self.in_turns:
            now = msgspec.msgpack.decode(
                await self._agree.ask("rescue", b"", lead), type=Awake | None
            )
            if now is not None:
                self._take(now, True)
                self._rescued = True
        return self._rescued

    @property
    def metrics(self) -> dict[str, float]:
        """Of the latest decision that was carried out; only the lead has them."""
        return self._mover.metrics if self._mover is not None else self._metrics

    def state(self) -> dict[str, Any]:
        """What a resumed run places by, as plain values; only the lead has it."""
        return self._mover.learned() if self._mover is not None else {}

    async def sampling(self) -> list[Peer]:
        """The replicas to draw from. In turns, all shards come here together, and the cells are the
        policy's.
        """
        await self._turn(False)
        return self.replicas

    async def judging(self) -> None:
        """All that this shard had drawn is there. In turns, all shards come here together, and the
        cells judge.
        """
        await self._turn(True)

    async def _turn(self, judging: bool) -> None:
        if self.in_turns and judging != self._judging:
            await self._agree.barrier("turn")
            if self._mover is not None:
                await self._mover.turn(judging)
            await self._agree.barrier("turned")
            self._judging = judging
