"""Produces groups without a break, several steps ahead of training."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np

from gcore_core.contract.errors import ContractError
from gcore_core.contract.records import QUARANTINED, TRAINED
from gcore_core.contract.run_files import Record
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.window.deadlines import Bounds, Deadlines, Membership, Told
from gcore_core.controllers.window.lanes import Round
from gcore_core.controllers.window.subsets import SubsetLedger
from gcore_core.controllers.window.verdicts import (
    Settled,
    logs_of_rewards,
    too_many_failures,
)
from gcore_core.controllers.window.window import TICK_SHARE, Taken, Window, _digests
from gcore_core.runtime.messages import TRAIN

# How often shards look together while a step waits for its groups: every ``TICK_S`` seconds, and
# when it has waited long after ``TICK_SHARE`` of that. While no step waits, every ``IDLE_TICK_S``.
TICK_S = 0.05
IDLE_TICK_S = 1.0


class Look(msgspec.Struct, array_like=True):
    """Holds what a shard says at a look, or what all of them say together.

    version: of the weights that it has seen published; of all shards the oldest.
    wanted: the step whose groups it wants; of all shards the lowest.
    told: its groups that have become complete since its last look; those of all shards are joined,
        by ordinal.
    push_waits: whether it waits with its push until nothing is in flight; whether any shard does.
    """

    version: int
    wanted: int
    told: list[Told]
    push_waits: bool = False


class RunningWindow(Window):
    """Produces this shard's part of the groups, for steps ahead of the one that is trained.

    It is used as a ``Window`` is: for each step, in order, ``take``, then ``commit``. Production
    begins with the first ``take`` and goes on beside whatever the program does. ``commit`` says
    that newer weights are published, under which the next groups are begun. Which groups are begun
    when, and which a step takes, is for ``Deadlines`` to decide.

    Where no sample may run through a push, ``drain`` is called before it. ``seal`` gives what a
    checkpoint needs, and ``stop`` ends production.

    Where a placement policy moves devices, a rollout begins with a push and ends when nothing is in
    flight any more; ``drain`` must then be called before each push.

    Every shard has the same ``Deadlines``: all shards *look* together, again and again, and tell
    each other which groups have ended. What follows from that each computes for itself.

    ahead, age: see ``deadlines``.
    """

    takes_any: ClassVar[bool] = True

    def __init__(
        self,
        context: ControllerContext,
        config: SyncConfig,
        placement: PlacementShard,
        *,
        ahead: int,
        age: int,
    ) -> None:
        facts = context.facts
        start = facts.start_step
        bounds = Bounds(
            prompts=config.prompts,
            ahead=ahead,
            age=age,
            limit=config.max_rounds * config.prompts,
            exact=facts.run.deterministic,
            steps=facts.run.steps,
        )
        self._deadlines = Deadlines(
            bounds=bounds,
            step=start,
            base=facts.next_ordinal,
            front=facts.next_ordinal,
            version=start,
            wanted=start - 1,
        )
        super().__init__(context, config, placement)
        self._subsets = SubsetLedger(
            self._group_has_ended,
            shard=facts.shard,
            shards=facts.shards,
            rows=facts.rows["train"],
            seed=facts.run.seed,
            samples=context.advantage.group_size,
            waves=self._ledger.waves,
            next_ordinal=facts.next_ordinal,
        )
        self._ledger = self._subsets
        self._numbered = -1  # the version whose rounds are numbered now
        self._numbers = 0  # how many of its rounds have a number
        self._version = start  # of the weights that this shard has seen published
        self._wanted = start - 1  # the step whose groups this shard wants
        self._settled = dict[int, Settled]()  # own groups that no step has taken
        self._latest = list[Settled]()  # of these, those that no look has told
        self._rollout = list[Record]()  # of the rollout, where devices move
        self._draws = set[asyncio.Task[None]]()
        self._failed: BaseException | None = None  # of a draw
        self._wake = asyncio.Event()
        self._has_taken = asyncio.Event()
        self._is_quiet = asyncio.Event()
        self._push_waits = False  # from ``drain`` to ``commit``
        self._taken: Taken | None = None
        self._task: asyncio.Task[None] | None = None
        self._waits_since_s = 0.0
        self._idle_since_s: float | None = None
        self._idle_s = 0.0
        self._metrics = dict[str, float]()
        self._restore()
        self._state = self._present_state()

    def _restore(self) -> None:
        """Takes over the groups that a checkpoint holds; a new run has none."""
        facts = self._context.facts
        ordinals = {header.ordinal for header in facts.carried}
        kept = self._deadlines.restore(facts.state.get("window", {}), ordinals)
        self._subsets.carry(header for header in facts.carried if header.ordinal in kept)
        self._subsets.lease_these(kept)  # nothing of them is to be drawn

    # -- what a step program calls -----------------------------------------------------------------

    async def take(self, step: int) -> Taken:
        """Returns the groups of ``step``, once they are there; raises what failed in producing."""
        if self._task is None:
            self._begin_rollout()
            self._task = asyncio.ensure_future(self._run())
        self._wanted = step
        self._waits_since_s = asyncio.get_running_loop().time()
        self._wake.set()
        await self._until(self._has_taken)
        self._has_taken.clear()
        taken, self._taken = self._taken, None
        if taken is None or taken.step != step:
            raise ContractError("steps must be taken in order", where=f"taking step {step}")
        return taken

    async def drain(self) -> None:
        """Returns when no sample of any shard is in flight and none is begun before a ``commit``.

        Every sample is scored then. Where devices move, this shard also asks no replica and no
        scorer any more.

        Raises what failed in producing.
        """
        self._push_waits = True
        self._wake.set()
        await self._until(self._is_quiet)
        if self._placement.moves:
            await self._end_draws()

    def seal(self, taken: Taken) -> Taken:
        """Returns ``taken`` with what a checkpoint behind its step holds, as of now.

        It holds the records of all groups that are complete, can be used, and are not taken. A run
        that goes on from it draws all others again.
        """
        deadlines = self._deadlines
        self._metrics |= {
            "window/groups": float(deadlines.in_flight + deadlines.finished),
            "window/in_flight": float(deadlines.in_flight),
        }
        return replace(
            taken,
            carried=self._subsets.held_records(),
            oldest=deadlines.oldest,
            state=self._present_state(),
        )

    def commit(self, taken: Taken) -> dict[int, tuple[str, str]]:
        """Says that a step has been trained on and its weights are published."""
        verdicts = super().commit(taken)
        self._version = taken.step + 1
        self._push_waits = False
        self._begin_rollout()
        self._wake.set()
        return verdicts

    async def stop(self) -> None:
        """Ends production; what is in flight is given up."""
        tasks = [*self._draws] if self._task is None else [self._task, *self._draws]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the step that was taken last, over all shards; the seconds are this shard's.

        The window's are as of ``seal``.
        """
        return self._metrics

    # -- the loop ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Looks, closes a step, begins groups and rests, over and over, until it is cancelled.

        Raises what failed in drawing, and TrainingError when too many groups cannot be used.
        """
        while True:
            await self._look()
            await self._take_if_there()
            self._begin_groups()
            self._note_quiet()
            await self._rest()

    async def _look(self) -> None:
        """Has all shards tell what has ended, and which version and step each is at."""
        self._wake.clear()
        self._settle_latest()
        told = [_told(one) for one in self._latest]
        own = Look(self._version, self._wanted, told, self._push_waits)

        async def lead(parts: list[bytes]) -> list[bytes]:
            looks = [msgspec.msgpack.decode(part, type=Look) for part in parts]
            together = Look(
                min(look.version for look in looks),
                min(look.wanted for look in looks),
                sorted((one for look in looks for one in look.told), key=lambda one: one.ordinal),
                any(look.push_waits for look in looks),
            )
            return [msgspec.msgpack.encode(together)] * self._agree.shards

        answer = await self._agree.ask("look", msgspec.msgpack.encode(own), lead)
        together = msgspec.msgpack.decode(answer, type=Look)
        self._deadlines.look(together.version, together.wanted, together.told, together.push_waits)
        self._raise_if_too_many_failed()
        self._latest = []

    def _settle_latest(self) -> None:
        """Gives a verdict to every group of this shard that has become complete."""
        for one in map(self._verdict, self._ledger.complete()):
            self._ledger.settle(one.ordinal, one.verdict, one.reason)
            self._settled[one.ordinal] = one
            self._latest.append(one)
            if self._placement.moves:
                self._rollout += self._context.trace.seen(one.group, one.verdict, one.reason)

    def _raise_if_too_many_failed(self) -> None:
        """Raises TrainingError when more than ``failure_limit`` of the groups cannot be used.

        Failures may come before all others, so what is still drawn counts, and never fewer groups
        than a step needs.
        """
        unusable = [one.group for one in self._latest if one.verdict == QUARANTINED]
        deadlines = self._deadlines
        groups = max(deadlines.complete + deadlines.in_flight, deadlines.bounds.prompts)
        if unusable and deadlines.unusable > self._config.failure_limit * groups:
            logs = logs_of_rewards(self._context.facts)
            raise too_many_failures(unusable, deadlines.unusable, deadlines.complete, logs)

    async def _take_if_there(self) -> None:
        """Closes the next step, for ``take`` to return, if all shards want it and it is there."""
        deadlines = self._deadlines
        if self._taken is not None or self._has_taken.is_set():
            return
        issued, rounds, first = deadlines.issued, deadlines.rounds, deadlines.consumed
        membership = deadlines.take()
        if membership is None:
            return
        counts = Counter(issued=issued if self._agree.lead else 0)
        counts["rounds"] = rounds if self._agree.lead else 0
        self._taken = self._close_step(membership, counts, first)
        self._has_taken.set()

    def _close_step(self, membership: Membership, counts: Counter[str], first: int) -> Taken:
        """Makes this shard's part of a step, and gives up the groups that the step consumes.

        membership: of the step, over all shards.
        counts: ``Taken.counts`` so far.
        first: ``Taken.first_ordinal``.
        """
        deadlines = self._deadlines
        step = deadlines.step - 1
        self._subsets.close_these(membership.consumed)
        own = [self._settled.pop(o) for o in membership.consumed if o in self._settled]
        trained = {one.ordinal for one in membership.trained}
        groups = []
        for one in own:
            if one.ordinal in trained:
                groups.append(one.group)
            else:
                counts[f"dropped/{one.reason}"] += 1
            self._context.trace.settled(one.group, one.verdict, one.reason)
        self._context.trace.flush()
        counts["kept"] = len(groups)
        self._left_out.take(own, bool(membership.trained))
        self._note_metrics(step, membership)
        return Taken(
            step=step,
            groups=groups,
            teaches=bool(membership.trained),
            counts=counts,
            carried=[],
            first_ordinal=first,
            oldest=deadlines.oldest,
            next_ordinal=deadlines.consumed,
            state=self._present_state(),
            digests=_digests(own),
        )

    def _begin_groups(self) -> None:
        """Begins what may be begun now, on all shards alike."""
        if ordinals := self._deadlines.issue():
            self._draw(ordinals)

    def _draw(self, ordinals: list[int]) -> None:
        """Has this shard's part of a round drawn, under the weights published last."""
        version = self._deadlines.version
        leases = self._subsets.lease_these(ordinals)
        # Memory is held for the version that begins the records: by that they are released.
        number = self._next_round(version)
        round_ = Round(step=version, number=number, purpose=TRAIN, least=version)
        draw = asyncio.ensure_future(self._drawing.draw(self._ledger, round_, leases))
        self._draws.add(draw)
        draw.add_done_callback(self._draw_has_ended)
        self._note_idle()

    def _next_round(self, version: int) -> int:
        """Returns the number of the next round; those of each version begin at 0."""
        if version != self._numbered:
            self._numbered = version
            self._numbers = 0
        self._numbers += 1
        return self._numbers - 1

    def _begin_rollout(self) -> None:
        """Begins what ``placement`` measures as a rollout, where devices move."""
        self._is_quiet.clear()  # until all shards are here
        if self._placement.moves:
            self._rollout = []
            self._placement.begin_rollout()

    def _note_quiet(self) -> None:
        """Notes whether nothing is in flight, and nothing is begun before the next push."""
        if self._deadlines.in_flight or self._is_behind():
            self._is_quiet.clear()
            return
        if self._placement.moves and not self._is_quiet.is_set():
            self._placement.end_rollout(self._rollout)
        self._is_quiet.set()

    async def _end_draws(self) -> None:
        """Ends the draws that still run although every group is whole.

        A request may outlast its last record, such as an empty part of a round, or one to a process
        that was lost meanwhile. Its replica may be about to sleep.
        """
        draws = list(self._draws)
        for draw in draws:
            draw.cancel()
        await asyncio.gather(*draws, return_exceptions=True)

    def _is_behind(self) -> bool:
        """Whether other shards were not yet where this one is, when all looked."""
        deadlines = self._deadlines
        return deadlines.version < self._version or deadlines.wanted < self._wanted

    async def _rest(self) -> None:
        """Waits until it is worth while to look; raises what failed in drawing.

        A look waits for the slowest shard. A shard that has drawn everything, or that is further
        than others, has nothing else to wait for and goes to the next look at once.
        """
        if self._failed is not None:
            raise self._failed
        others_draw = self._deadlines.in_flight and not self._draws
        if not others_draw and not self._is_behind():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s()):
                    await self._wake.wait()
        if self._failed is not None:
            raise self._failed

    def _tick_s(self) -> float | None:
        """Returns for how long to wait at most; None where only an event can change anything."""
        if not self._draws:
            return None
        if self._deadlines.wanted < self._deadlines.step:
            return IDLE_TICK_S
        waited_s = asyncio.get_running_loop().time() - self._waits_since_s
        return max(TICK_S, TICK_SHARE * waited_s)

    async def _until(self, ready: asyncio.Event) -> None:
        """Returns when ``ready`` is set; raises what ended production before."""
        if self._task is None:
            return
        waiting = asyncio.ensure_future(ready.wait())
        try:
            async with self._context.trainers_free():
                await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._task.result()
        finally:
            waiting.cancel()

    # -- what wakes it -----------------------------------------------------------------------------

    def _group_has_ended(self) -> None:
        """Wakes the loop if all of this shard's part of the wanted step is complete.

        It is called whenever a group of this shard has become complete.
        """
        if self._deadlines.wanted < self._deadlines.step:
            return
        for ordinal in self._deadlines.next_part():
            is_own = ordinal % self._ledger.shards == self._ledger.shard
            if is_own and not self._subsets.has_ended(ordinal):
                return
        self._wake.set()

    def _draw_has_ended(self, task: asyncio.Task[None]) -> None:
        """Wakes the loop if the draw has failed, or was the last one of this shard."""
        self._draws.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = task.exception()
        if self._failed is not None or not self._draws:
            self._wake.set()
        self._note_idle()

    # -- numbers -----------------------------------------------------------------------------------

    def _note_idle(self) -> None:
        """Counts the seconds in which nothing of this shard was being drawn."""
        now_s = asyncio.get_running_loop().time()
        if self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
        self._idle_since_s = None if self._draws else now_s

    def _note_metrics(self, step: int, membership: Membership) -> None:
        self._note_idle()
        self._metrics = {"seconds/no_draws": self._idle_s}
        self._idle_s = 0.0
        trained = membership.trained
        if trained:
            self._metrics |= {
                "age/mean": step - float(np.mean([one.mean_first for one in trained])),
                "age/largest": float(step - min(one.first for one in trained)),
                "age/spanning_share": float(np.mean([one.spanning for one in trained])),
            }

    def _present_state(self) -> dict[str, Any]:
        ledger = {**self._ledger.state(), "next_ordinal": self._deadlines.base}
        return {"ledger": ledger, "quota": {}, "window": self._deadlines.state()}


def _told(one: Settled) -> Told:
    """Returns what all shards are told of a group that has its verdict."""
    firsts = [header.versions[0] for header in one.group]
    spanning = [header.versions[0] != header.versions[1] for header in one.group]
    return Told(
        one.ordinal,
        one.verdict == TRAINED,
        one.verdict == QUARANTINED,
        min(firsts),
        float(np.mean(firsts)),
        float(np.mean(spanning)),
    )
