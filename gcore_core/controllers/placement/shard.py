"""Keeps every shard informed of which replicas are awake.

The lead asks the placement policy and moves replicas; the other shards get the result from it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.launching import Peer
from gcore_core.contract.placement import Device
from gcore_core.contract.run_files import RecordTrace
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.lead import Awake, Last, PlacementLead
from gcore_core.controllers.placement.measurements import (
    Gauge,
    NodeGauge,
    pack_requests,
    unpack_requests,
)
from gcore_core.controllers.placement.sleepers import Sleepers


class PlacementShard:
    """Says which replicas are awake, on one shard.

    In a run whose policy moves nothing, every replica is awake in every rollout. Where it moves
    devices, it does so by *cells*: devices that always change roles together and hold whole
    replicas of any role. Roles that share cells may have them *in turns*: in a rollout all cells
    serve the policy until every record is drawn, then the judges.

    A step program calls ``sleep`` when a rollout is over and ``decide`` before each push. A program
    that generates ahead of training never calls ``sleep``. What draws records asks ``awake``,
    ``sampling`` and ``judging``.

    Where a placement policy moves devices, no rollout may be in flight at ``decide``: no sample,
    and no question to a judge. Where generation runs ahead of training, a rollout is what is drawn
    from one push to the next.

    awake: who is awake now; the one place to read it.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._agree = context.agree.scope("placement")
        self._facts = context.facts.placement
        self._peers = {ROLLOUT: context.replicas, **context.judges}
        everybody = {role: list(range(len(peers))) for role, peers in self._peers.items()}
        self.awake = Awake(version=0, replicas=everybody, in_turns=False)
        asleep_in_training = context.facts.asleep_in_training
        able = asleep_in_training if self._facts is None else self._facts.sleeps
        self._sleepers = Sleepers(self._peers, able, asleep_in_training)
        moves = self._facts is not None and self._agree.lead
        self._lead = PlacementLead(context, everybody, self._sleepers) if moves else None
        self._gauge = self._make_gauge(context) if moves else None
        self._metrics: dict[str, float] = {}
        self._records: list[RecordTrace] = []
        self._arranged_s = self._began_s = self._ended_s = 0.0
        self._judging = False  # in turns: whether the cells serve the judges now
        self._rescued = False  # whether a judge was helped in this rollout

    def _make_gauge(self, context: ControllerContext) -> Gauge | None:
        """Makes what measures the use of the generators' devices; None where nobody asks."""
        facts = self._facts
        if facts is None or not facts.meter:
            return None
        device_of = {device.index: device for device in facts.devices}
        workers: dict[str, dict[str, list[Device]]] = defaultdict(dict)  # of each agent
        for role, peers in self._peers.items():
            placed = zip(peers, facts.agents[role], facts.engines[role], strict=True)
            for peer, agent, indexes in placed:
                workers[agent][peer.name] = [device_of[index] for index in indexes]
        return Gauge(
            facts.meter,
            [NodeGauge(context.agents[agent], named) for agent, named in workers.items()],
        )

    @property
    def moves(self) -> bool:
        """Whether a placement policy moves devices."""
        return self._facts is not None

    @property
    def replicas(self) -> list[Peer]:
        """The policy's generators that are awake, by number."""
        return [self._peers[ROLLOUT][i] for i in self.awake.replicas[ROLLOUT]]

    def begin_rollout(self) -> None:
        """Notes the start of a rollout, from which its seconds are counted."""
        self._began_s = asyncio.get_running_loop().time()
        self._records = []
        self._rescued = False
        if self._gauge is not None:
            self._gauge.begin()

    def end_rollout(self, records: Iterable[RecordTrace]) -> None:
        """Keeps the time and the records of the rollout, from which ``decide`` measures it.

        Called again, with more records, where the rollout has gone on: the last call counts.
        """
        self._ended_s = asyncio.get_running_loop().time()
        self._records = list(records)
        if self._gauge is not None:
            self._gauge.end()

    async def sleep(self) -> None:
        """Gives the trainer the memory of replicas that may sleep, until ``decide``.

        The rollout must be over on all shards.
        """
        if self._agree.lead:
            await self._sleepers.sleep()

    async def decide(self, step: int, release_before: int) -> None:
        """Decides who is awake in the rollout of ``step``, and wakes and puts to sleep.

        All shards call it, before the push: only replicas that are awake get the push.

        release_before: no record of earlier steps is needed any more; replicas that sleep are told
            so here, since no push tells them.
        """
        if self._facts is None:
            await self._wake_all(release_before)
            return
        judges = [role for role in self._peers if role != ROLLOUT]
        clock = asyncio.get_running_loop().time
        trained_s = clock()
        # Two clocks: the stages of a step are timed by the event loop, whose time is virtual in a
        # simulation. Packing and reading measurements takes no virtual time, so the real clock
        # times it.
        packing_began_s = time.perf_counter()
        packed = msgspec.msgpack.encode(pack_requests(self._records, judges, self._began_s))
        packing_s = time.perf_counter() - packing_began_s

        async def lead(parts: list[bytes]) -> list[bytes]:
            unpacking_began_s = time.perf_counter()
            rows = [msgspec.msgpack.decode(part, type=tuple[bytes, bytes]) for part in parts]
            is_measured = any(sampled for sampled, _ in rows)  # not before the first rollout
            requests = unpack_requests(rows, step - 1, ROLLOUT, judges) if is_measured else {}
            # One step is a row of stages, each between two times that this shard has noted:
            #     _arranged_s  pushing  _began_s  rollout  _ended_s  training  trained_s
            # A checkpoint, a report or an evaluation counts as pushing or training, whichever of
            # them the step program does it in. ``sleep`` lies in training and is not of it.
            last = Last(
                requests=requests,
                rollout_s=self._ended_s - self._began_s,
                training_s=trained_s - self._ended_s - self._sleepers.sleep_s,
                pushing_s=self._began_s - self._arranged_s,
                monitoring_s=packing_s + time.perf_counter() - unpacking_began_s,
                used=await self._gauge.shares() if self._gauge is not None else {},
            )
            awake = await cast(PlacementLead, self._lead).decide(step, release_before, last)
            return [msgspec.msgpack.encode(awake)] * self._agree.shards

        answer = await self._agree.ask("placement", packed, lead)
        self.awake = msgspec.msgpack.decode(answer, type=Awake)
        self._judging = False
        self._arranged_s = clock()

    async def _wake_all(self, release_before: int) -> None:
        """Wakes the replicas that slept in training, where nothing moves; the lead does it."""
        if self._agree.lead:
            woke_s = await self._sleepers.arrange(self.awake.replicas, release_before)
            took_s = woke_s + self._sleepers.sleep_s
            self._metrics = {"placement/switch_s": took_s} if took_s else {}

    async def rescue(self) -> bool:
        """Gives a judge whose replicas do not answer cells of the policy's generators.

        It is called on all shards when all that was issued is drawn and not all is judged: then
        the policy's generators have nothing to do.

        Returns whether a judge was helped in this rollout, by this call or an earlier one.
        """

        async def lead(_: list[bytes]) -> list[bytes]:
            awake = await cast(PlacementLead, self._lead).rescue()
            return [msgspec.msgpack.encode(awake)] * self._agree.shards

        if self._facts is not None and not self.awake.in_turns:
            answer = await self._agree.ask("rescue", b"", lead)
            awake = msgspec.msgpack.decode(answer, type=Awake | None)
            if awake is not None:
                self.awake = awake
                self._judging = True
                self._rescued = True
        return self._rescued

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the latest decision that was carried out; empty except in the lead."""
        return self._lead.metrics if self._lead is not None else self._metrics

    def state(self) -> dict[str, Any]:
        """Returns what placement of a resumed run goes on with, as plain values.

        It is empty except in the lead.
        """
        return self._lead.learned() if self._lead is not None else {}

    async def sampling(self) -> list[Peer]:
        """Returns the policy's generators, once they can be asked.

        In turns, it waits until all shards are here and then gives the cells to the policy.
        """
        await self._begin_phase(False)
        return self.replicas

    async def judging(self) -> None:
        """Says that all records of this shard are drawn; returns when judges can be asked.

        In turns, it waits until all shards are here and then gives the cells to the judges.
        """
        await self._begin_phase(True)

    async def _begin_phase(self, judging: bool) -> None:
        """In turns, gives the cells to the judges or to the policy, unless these have them."""
        # After the first barrier no shard uses the replicas that are put to sleep. The second keeps
        # every shard from asking replicas that are not awake yet.
        if self.awake.in_turns and judging != self._judging:
            await self._agree.barrier("phase")
            if self._lead is not None:
                await self._lead.begin_phase(judging)
            await self._agree.barrier("phase begun")
            self._judging = judging
