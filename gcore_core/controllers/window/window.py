"""Produces groups, from their leases to their verdicts, for a step program to take."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import QUARANTINED, TRAINED, Header
from gcore_core.contract.run_files import Record
from gcore_core.controllers.algorithm_answers import waves_of
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.keep_rate import by_quarter
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.window.drawing import Drawing
from gcore_core.controllers.window.dynamic_sampling import Leftover, Quota
from gcore_core.controllers.window.lanes import Round
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.controllers.window.scoring import route_judges
from gcore_core.controllers.window.verdicts import (
    LeftOut,
    Settled,
    logs_of_rewards,
    too_many_failures,
    verdict_on,
)
from gcore_core.runtime.messages import TRAIN
from gcore_core.runtime.step_digests import generation_digest, rewarding_digest, sum_of

# How often shards look, together, whether more groups must be issued: every ``TICK_S`` seconds, and
# in a long rollout only after ``TICK_SHARE`` of its time, since a look costs as much as 30 records.
TICK_S = 1.0
TICK_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Holds what a step trains on, and what is left for the steps behind it.

    step: whose groups these are.
    groups: this shard's groups that the step trains on, by ordinal; each group's records by sample.
    teaches: whether any shard has a group to train on.
    counts: name -> a number whose sum over the shards is reported: groups by what became of them,
        and rounds.
    carried: this shard's records that wait for the next step.
    first_ordinal: the ordinal of the run at which the step begins. Where steps take ordinals in any
        order: how many of the run were consumed before.
    oldest: the first step of which any record is still needed when this step has been trained on.
    next_ordinal: likewise, of the next step.
    state: what a run that is resumed behind this step goes on with; plain values.
    digests: stage -> sum of the digests of this shard's records that the step takes, also of those
        that do not teach.
    """

    step: int
    groups: list[list[Header]]
    teaches: bool
    counts: Counter[str]
    carried: list[Header]
    first_ordinal: int
    oldest: int
    next_ordinal: int
    state: dict[str, Any] = field(repr=False)
    digests: dict[str, int] = field(default_factory=dict)


class Window:
    """Produces this shard's part of the groups that steps train on.

    For each step, in order: ``take`` its groups, which produces them, train on them, ``commit``.
    All shards call the same in the same order. The window's agreements are in a scope of their own,
    so they need no order with those of training. ``RunningWindow`` generates ahead of training.

    It takes ordinals from one end to the other. With a checkpoint of steps that took them in
    another order it raises ConfigError.

    takes_any: whether its steps take ordinals in any order.
    """

    takes_any: ClassVar[bool] = False

    def __init__(
        self, context: ControllerContext, config: SyncConfig, placement: PlacementShard
    ) -> None:
        facts = context.facts
        if not self.takes_any:
            _check_in_order(facts.state)
        self._context = context
        self._config = config
        self._placement = placement
        self._agree = context.agree.scope("window")
        self._ledger = Ledger(
            shard=facts.shard,
            shards=facts.shards,
            rows=facts.rows["train"],
            seed=facts.run.seed,
            samples=context.advantage.group_size,
            waves=_waves(context),
            next_ordinal=facts.next_ordinal,
        )
        self._quota = Quota.of(config, facts.run.deterministic, facts.takes_stale)
        self._quota.restore(facts.state.get("quota", {}))
        if self._quota.carries:
            self._ledger.carry(facts.carried)
        self._drawing = Drawing(context, placement)
        self._left_out = LeftOut()
        self._state = self._present_state()

    async def take(self, step: int) -> Taken:
        """Produces the groups of ``step`` under weights of its version, and returns them.

        It draws until all shards together have enough groups that teach, or the limit is issued.
        Raises what failed meanwhile.
        """
        first_ordinal = self._ledger.next_ordinal
        settled = list[Settled]()
        draws = set[asyncio.Task[None]]()
        began_s = asyncio.get_running_loop().time()
        self._placement.begin_rollout()
        self._quota.begin()
        async with self._context.trainers_free():
            try:
                while not self._quota.over:
                    round_ = Round(step=step, number=self._quota.rounds, purpose=TRAIN, least=step)
                    if count := self._quota.issue():
                        leases = self._ledger.lease(count)
                        drawing = self._drawing.draw(self._ledger, round_, leases)
                        draws.add(asyncio.ensure_future(drawing))
                    await self._wait(draws, began_s)
                    latest = self._settle()
                    await self._share(latest)
                    settled += latest
            finally:
                for task in draws:
                    task.cancel()
        return await self._close(step, settled, first_ordinal)

    def commit(self, taken: Taken) -> dict[int, tuple[str, str]]:
        """Says that a step has been trained on and its weights are published.

        Steps are committed in order. Returns ordinal -> (verdict, reason), for each of this shard's
        groups that the step consumed.
        """
        self._state = taken.state
        return self._ledger.commit()

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, as of the step that was committed last."""
        return self._state

    def _present_state(self) -> dict[str, Any]:
        return {"ledger": self._ledger.state(), "quota": self._quota.state()}

    # -- producing ---------------------------------------------------------------------------------

    async def _wait(self, draws: set[asyncio.Task[None]], began_s: float) -> None:
        """Waits for what was issued, at most until the next look whether more must be issued.

        Raises what failed in drawing. Draws that have ended are removed from ``draws``.
        """
        if not draws:
            return
        tick_s = max(TICK_S, TICK_SHARE * (asyncio.get_running_loop().time() - began_s))
        # Two cases without a time limit: an exact quota issues nothing before everything is there,
        # and in turns the shards must stay together.
        at_once = self._quota.exact or self._placement.awake.in_turns
        ended, _ = await asyncio.wait(
            draws, timeout=None if at_once else tick_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in ended:
            task.result()
            draws.discard(task)

    def _settle(self) -> list[Settled]:
        """Gives a verdict to every group of this shard that has become complete; returns these."""
        settled = [self._verdict(group) for group in self._ledger.complete()]
        for one in settled:
            self._ledger.settle(one.ordinal, one.verdict, one.reason)
        return settled

    def _verdict(self, group: list[Header]) -> Settled:
        return verdict_on(
            group,
            self._config,
            self._context.facts.rewards,
            self._context.filter,
            self._context.filter_code,
        )

    async def _share(self, latest: Sequence[Settled]) -> None:
        """Sums the verdicts over all shards into the quota, and helps judges that do not answer.

        Raises TrainingError when more than ``failure_limit`` of the step's groups cannot be used,
        whatever becomes of those that are still drawn: failures may come before all others.

        latest: this shard's groups that were settled since the last call.
        """
        teaching = sum(one.verdict == TRAINED for one in latest)
        unusable = [one.group for one in latest if one.verdict == QUARANTINED]
        shares = np.array([teaching, len(unusable), len(latest), self._ledger.drawn])
        sums = [round(float(value)) for value in await self._agree.sum("settled", shares)]
        self._quota.settled(*sums[:3])
        totals = self._quota.totals
        if unusable and totals.unusable > self._config.failure_limit * totals.issued:
            logs = logs_of_rewards(self._context.facts)
            raise too_many_failures(unusable, totals.unusable, totals.complete, logs)
        all_shards_have_drawn = sums[3] == self._agree.shards
        if all_shards_have_drawn and totals.in_flight > 0 and await self._placement.rescue():
            await route_judges(self._context, self._placement)

    # -- the end of a step -------------------------------------------------------------------------

    async def _close(self, step: int, settled: list[Settled], first_ordinal: int) -> Taken:
        """Ends the step behind the last group that it takes; groups behind that are surplus."""
        await self._learn()  # before the ledger forgets the verdicts on the surplus
        teach = [one.ordinal for one in settled if one.verdict == TRAINED]
        issued_to = self._ledger.next_ordinal
        end = await self._agree_on_end(teach)
        surplus = self._ledger.close(end, self._quota.carries)
        carried = self._ledger.carried()
        self._quota.close(await self._sum_leftover(issued_to - end, carried, teach))
        counts = Counter(surplus=len(surplus), surplus_carried=len(carried))
        groups = self._groups_taken(settled, end, counts)
        teaches = self._quota.totals.kept > 0
        self._left_out.take([one for one in settled if one.ordinal < end], teaches)
        return Taken(
            step=step,
            groups=groups,
            teaches=teaches,
            counts=counts,
            carried=self._ledger.carried_records(),
            first_ordinal=first_ordinal,
            oldest=step if self._quota.holds else step + 1,
            next_ordinal=end,
            state=self._present_state(),
            digests=_digests([one for one in settled if one.ordinal < end]),
        )

    async def _learn(self) -> None:
        """Tells the quota how many of each quarter of the step's groups were kept."""
        if self._quota.learns:
            teaches = np.array(
                [verdict == TRAINED for verdict in self._ledger.verdicts()], np.int64
            )
            counts = np.array([by_quarter(teaches), by_quarter(np.ones(len(teaches)))])
            sums = np.rint(await self._agree.sum("quarters", counts)).astype(int)
            of_quarters = sums.reshape(2, -1).tolist()
            self._quota.learn(kept=of_quarters[0], finished=of_quarters[1])

    async def _agree_on_end(self, teach: list[int]) -> int:
        """Agrees with the other shards on the ordinal behind the last one that the step takes.

        The lead computes it from the ordinals that teach, of all shards.

        teach: this shard's ordinals that teach.
        """
        next_ordinal = self._ledger.next_ordinal

        async def lead(parts: list[bytes]) -> list[bytes]:
            decoded = [msgspec.msgpack.decode(part, type=list[int]) for part in parts]
            teaching = [ordinal for part in decoded for ordinal in part]
            end = self._quota.end(teaching, next_ordinal)
            return [msgspec.msgpack.encode(end)] * self._agree.shards

        answer = await self._agree.ask("kept", msgspec.msgpack.encode(teach), lead)
        return msgspec.msgpack.decode(answer, type=int)

    async def _sum_leftover(self, surplus: int, carried: list[int], teach: list[int]) -> Leftover:
        """Sums up, over all shards, what the step leaves for the next one.

        surplus: groups behind the step's end, of all shards.
        carried: this shard's ordinals that are carried.
        teach: this shard's ordinals that teach.
        """
        if not self._quota.carries or not surplus:
            return Leftover()
        counts = np.array([len(carried), len(set(carried) & set(teach))])
        sums = await self._agree.sum("carried", counts)
        return Leftover(surplus, *(round(float(value)) for value in sums))

    def _groups_taken(
        self, settled: list[Settled], end: int, counts: Counter[str]
    ) -> list[list[Header]]:
        """Picks the groups that the step trains on; counts and traces what became of each group.

        settled: this shard's groups that the step has drawn or carried.
        end: the ordinal behind the last one that the step takes.
        counts: gets the counts of the step's report.
        """
        groups = []
        records = list[Record]()
        for one in sorted(settled, key=lambda one: one.ordinal):
            is_taken = one.ordinal < end
            if is_taken and one.verdict == TRAINED:
                groups.append(one.group)
            elif is_taken:
                counts[f"dropped/{one.reason}"] += 1
            verdict = one.verdict if is_taken else "surplus"
            records += self._context.trace.settled(one.group, verdict, one.reason)
        self._placement.end_rollout(records)
        self._context.trace.flush()
        counts["issued"] = len(settled)
        counts["kept"] = len(groups)
        counts["rounds"] = self._quota.rounds if self._agree.lead else 0
        return groups


def _check_in_order(state: Mapping[str, Any]) -> None:
    """Raises ConfigError where the steps of a checkpoint have taken groups out of order.

    state: what the controllers saved.
    """
    above = state.get("window", {}).get("above")
    if not above:
        return
    base = state["ledger"]["next_ordinal"]
    raise ConfigError(
        "a window that takes groups in order cannot go on from this checkpoint: its steps took "
        "groups out of order.",
        where="controller.use",
        why=f"ordinal {base} is not consumed, and {above[0]} is: it would be trained on again",
        todo="resume it with the program that saved it (controller.use); with ahead: 0 and age: 0 "
        "some steps of it take what is left, and another program can go on",
    )


def _waves(context: ControllerContext) -> list[int] | None:
    """Returns how many of a group's records each wave draws; None for all at once."""
    if context.sampling is None:
        return None
    return waves_of(context.sampling_code, context.sampling, context.advantage.group_size)


def _digests(taken: Sequence[Settled]) -> dict[str, int]:
    """Returns ``Taken.digests`` of these groups."""
    headers = [header for one in taken for header in one.group]
    return {
        "generation": sum_of(map(generation_digest, headers)),
        "rewarding": sum_of(map(rewarding_digest, headers)),
    }
