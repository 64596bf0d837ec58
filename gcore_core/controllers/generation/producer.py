"""Produces groups, from their leases to their verdicts, for a step program to take."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.records import FAILED, QUARANTINED, TRAINED, Header
from gcore_core.contract.run_files import RecordTrace
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.generation.dispatch import Round, draw
from gcore_core.controllers.generation.in_step import InStep
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.generation.schedule import GroupReport, Membership, Schedule
from gcore_core.controllers.generation.scoring import route_judges
from gcore_core.controllers.generation.verdicts import (
    Verdict,
    check_any_fits,
    latest_too_long,
    logs_of_rewards,
    too_many_failures,
    verdict_on,
)
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.runtime.messages import TRAIN
from gcore_core.runtime.step_digests import generation_digest, rewarding_digest, sum_of
from gcore_core.runtime.worker_settings import JobFacts

# How often shards look together: while a step waits, every ``tick_s`` seconds of the schedule, and
# when it has waited long only after ``TICK_SHARE`` of that, since a look costs as much as 30
# records. While no step waits, every ``IDLE_TICK_S``.
TICK_SHARE = 0.05
IDLE_TICK_S = 1.0


class ShardProgress(msgspec.Struct, array_like=True):
    """Holds what a shard says at a look.

    version: of the weights that it has seen published.
    wanted: the step whose groups it wants.
    told: its groups that have become complete since its last look, in that order.
    push_waits: whether it waits with its push until nothing is in flight.
    drawn: whether it has every record of every group that was begun.
    """

    version: int
    wanted: int
    told: list[GroupReport]
    push_waits: bool
    drawn: bool


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Holds what a step trains on, and what is left for the steps behind it.

    step: whose groups these are.
    groups: this shard's groups that the step trains on, by ordinal; each group's records by sample.
    teaches: whether any shard has a group to train on.
    counts: name -> a number whose sum over the shards is reported: groups by what became of them,
        and rounds.
    carried: this shard's records that wait for the next step.
    first_ordinal: the ordinal of the run at which the step begins. Where steps take ordinals in any
        order: how many of the run were consumed before.
    oldest: the first step whose records are still needed when this step has been trained on.
    next_ordinal: the same as ``first_ordinal``, of the next step.
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


class Producer:
    """Produces this shard's part of the groups that steps train on.

    For each step, in order: ``take`` its groups, train on them, push, ``note_published``. All
    shards call the same in the same order. The producer's agreements are in a scope of their own,
    so they need no order with the agreements of training.

    Which groups are begun when, and which a step takes, is for the schedule to decide. Every shard
    has the same: all shards *look* together, again and again, and tell each other which groups have
    ended. What follows from that each computes for itself.

    Under a schedule that *runs on*, production begins with the first ``take`` and goes on
    whatever the program does. ``note_published`` says that newer weights are published, under
    which the next groups are begun. Where no sample may run through a push, ``drain`` is called
    before it. ``seal`` gives what a checkpoint needs, and ``stop`` ends production. Where a
    placement policy moves devices, a rollout begins with a push and ends when nothing is in flight
    any more; ``drain`` must then be called before each push.

    schedule: None: ``InStep``.
    """

    def __init__(
        self,
        context: ControllerContext,
        config: SyncConfig,
        placement: PlacementShard,
        schedule: Schedule | None = None,
    ) -> None:
        facts = context.facts
        self._context = context
        self._config = config
        self._placement = placement
        self._agree = context.agree.scope("producer")
        self._schedule = InStep.of(config, facts) if schedule is None else schedule
        _check_ages(self._schedule, facts)
        self._ledger = Ledger(
            shard=facts.shard,
            shards=facts.shards,
            rows=facts.rows["train"],
            seed=facts.run.seed,
            samples=context.advantage.group_size,
            tells=self._group_has_ended,
        )
        self._too_long = list[Verdict]()  # the latest groups, while all have too long a prompt
        self._numbered = -1  # the version whose rounds are numbered now
        self._numbers = 0  # how many of its rounds have a number
        self._version = facts.start_step  # of the weights that this shard has seen published
        self._wanted = facts.start_step - 1  # the step whose groups this shard wants
        self._settled = dict[int, Verdict]()  # own groups that no step has taken
        self._latest = list[Verdict]()  # of these, those that no look has told
        self._rollout = list[RecordTrace]()  # of the rollout, where devices move
        self._draws = set[asyncio.Task[None]]()
        self._failed: BaseException | None = None  # of a draw
        self._wake = asyncio.Event()
        self._has_taken = asyncio.Event()
        self._is_quiet = asyncio.Event()
        self._push_waits = False  # from ``drain`` to ``note_published``
        self._taken: StepBatch | None = None
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
        kept = set(self._schedule.restore(facts.state, ordinals))
        self._ledger.carry(header for header in facts.carried if header.ordinal in kept)
        if self._schedule.runs_on:
            self._ledger.lease(kept)  # nothing of them is to be drawn

    # -- what a step program calls -----------------------------------------------------------------

    async def take(self, step: int) -> StepBatch:
        """Returns the groups of ``step``, once they are there; raises what failed in producing."""
        self._wanted = step
        self._waits_since_s = asyncio.get_running_loop().time()
        taken = await (self._await_step() if self._schedule.runs_on else self._produce_step())
        if taken is None or taken.step != step:
            raise ContractError("steps must be taken in order", where=f"taking step {step}")
        return taken

    def note_published(self, taken: StepBatch) -> dict[int, tuple[str, str]]:
        """Says that the weights of a step that was taken are published, and so the step is over.

        Steps come in order. Returns ordinal -> (verdict, reason), for each of this shard's
        groups that the step consumed.
        """
        self._state = taken.state
        self._version = taken.step + 1
        self._push_waits = False
        if self._schedule.runs_on:
            self._begin_rollout()
            self._wake.set()
        return self._ledger.pop_verdicts()

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, as of the weights published last."""
        return self._state

    def _present_state(self) -> dict[str, Any]:
        ledger = {"next_ordinal": self._schedule.base, **self._ledger.state()}
        return {"ledger": ledger, **self._schedule.state()}

    # -- the loop ----------------------------------------------------------------------------------

    async def _produce_step(self) -> StepBatch:
        """Produces until the step that is wanted has its groups."""
        self._begin_rollout()
        async with self._context.trainers_free():
            try:
                while (membership := self._schedule.take_if_ready()) is None:
                    self._begin_groups()
                    await self._pause()
                    await self._look()
            finally:
                for drawing in self._draws:
                    drawing.cancel()
                self._draws.clear()
        return self._close_step(membership)

    def _begin_rollout(self) -> None:
        self._is_quiet.clear()  # until all shards are here
        self._rollout = []
        self._placement.begin_rollout()

    async def _look(self) -> None:
        """Lets all shards tell what has ended, and which version and step each is at."""
        self._wake.clear()
        self._settle_complete()
        told = [_told(one) for one in self._latest]
        drawn = self._ledger.drawn
        own = ShardProgress(self._version, self._wanted, told, self._push_waits, drawn)
        payloads = await self._tell(msgspec.msgpack.encode(own))
        looks = [msgspec.msgpack.decode(payload, type=ShardProgress) for payload in payloads]
        version = min(look.version for look in looks)
        wanted = min(look.wanted for look in looks)
        push_waits = any(look.push_waits for look in looks)
        ended = [one for look in looks for one in look.told]
        self._schedule.look(version, wanted, ended, push_waits)
        self._raise_if_too_many_failed()
        self._latest = []
        if not self._schedule.runs_on and all(look.drawn for look in looks):
            await self._rescue()

    async def _tell(self, payload: bytes) -> list[bytes]:
        """Tells all shards what this one says; returns what each of them says.

        Production that runs on looks again as soon as it is answered. There the answer comes by way
        of the lead, which takes twice as long, and so makes looks fewer.
        """
        if not self._schedule.runs_on:
            return await self._agree.share("look", payload)

        async def lead(payloads: list[bytes]) -> list[bytes]:
            return [msgspec.msgpack.encode(payloads)] * len(payloads)

        answer = await self._agree.ask("look", payload, lead)
        return msgspec.msgpack.decode(answer, type=list[bytes])

    def _settle_complete(self) -> None:
        """Gives a verdict to every group of this shard that has become complete."""
        ended = self._ledger.ended
        for group in self._ledger.complete():
            one = self._verdict(group)
            self._ledger.settle(one.ordinal, one.verdict, one.reason)
            self._settled[one.ordinal] = one
            if self._placement.moves and self._schedule.runs_on:
                self._rollout += self._context.trace.seen(one.group, one.verdict, one.reason)
        self._latest += [self._settled[ordinal] for ordinal in ended]

    def _verdict(self, group: list[Header]) -> Verdict:
        return verdict_on(
            group,
            self._config,
            self._context.facts.rewards,
            self._context.filter,
            self._context.filter_code,
        )

    def _raise_if_too_many_failed(self) -> None:
        """Raises TrainingError when more than ``failure_limit`` of the groups cannot be used.

        Failures may come before all others, so what is still drawn counts, and never fewer groups
        than a step needs.
        """
        unusable = [one.group for one in self._latest if one.verdict == QUARANTINED]
        if not unusable:
            return
        schedule = self._schedule
        groups = max(len(schedule.ended) + schedule.in_flight, schedule.bounds.prompts)
        of_all_shards = sum(one.unusable for one in schedule.ended)
        if of_all_shards > self._config.failure_limit * groups:
            logs = logs_of_rewards(self._context.facts)
            raise too_many_failures(unusable, of_all_shards, len(schedule.ended), logs)

    async def _rescue(self) -> None:
        """Helps judges that do not answer, where nothing is left to draw."""
        if self._schedule.in_flight and await self._placement.rescue():
            await route_judges(self._context, self._placement)

    def _begin_groups(self) -> None:
        if ordinals := self._schedule.issue():
            self._draw(ordinals)

    def _draw(self, ordinals: list[int]) -> None:
        """Begins to draw this shard's part of a round, under the weights published last."""
        version = self._schedule.version
        leases = self._ledger.lease(ordinals)
        # Memory is held for the version that begins the records: by that they are released.
        number = self._next_round(version)
        round_ = Round(version=version, number=number, purpose=TRAIN)
        drawing = asyncio.ensure_future(
            draw(self._context, self._placement, self._ledger, round_, leases)
        )
        self._draws.add(drawing)
        drawing.add_done_callback(self._draw_has_ended)
        self._note_idle()

    def _next_round(self, version: int) -> int:
        """Returns the number of the next round; it begins at 0 for each version."""
        if version != self._numbered:
            self._numbered = version
            self._numbers = 0
        self._numbers += 1
        return self._numbers - 1

    def _draw_has_ended(self, task: asyncio.Task[None]) -> None:
        """Wakes the loop if the draw has failed, or was the last one of this shard."""
        if task not in self._draws:  # its step is over
            return
        self._draws.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = task.exception()
        if self._failed is not None or not self._draws:
            self._wake.set()
        self._note_idle()

    def _note_idle(self) -> None:
        """Counts the seconds in which nothing of this shard was being drawn."""
        now_s = asyncio.get_running_loop().time()
        if self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
        self._idle_since_s = None if self._draws else now_s

    async def _pause(self) -> None:
        """Waits until it is worth while to look; raises what failed in drawing.

        A look waits for the slowest shard. A shard that has drawn everything, or that is further
        than others, has nothing else to wait for and goes to the next look at once.
        """
        if not self._schedule.runs_on:
            await self._pause_in_step()
        elif not (self._schedule.in_flight and not self._draws) and not self._is_behind():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s()):
                    await self._wake.wait()
        if self._failed is not None:
            raise self._failed

    async def _pause_in_step(self) -> None:
        if self._draws:
            # Two cases without a time limit: a run that is to repeat issues nothing before
            # everything is there, and in turns the shards must stay together.
            all_of_them = self._schedule.bounds.exact or self._placement.awake.in_turns
            tick_s = None if all_of_them else self._tick_s()
            await asyncio.wait(self._draws, timeout=tick_s, return_when=asyncio.FIRST_EXCEPTION)

    def _tick_s(self) -> float | None:
        """Returns for how long to wait at most; None where only an event can change anything."""
        if not self._draws:
            return None
        schedule = self._schedule
        if schedule.runs_on and schedule.wanted < schedule.step:
            return IDLE_TICK_S
        waited_s = asyncio.get_running_loop().time() - self._waits_since_s
        return max(schedule.tick_s, TICK_SHARE * waited_s)

    # -- the end of a step -------------------------------------------------------------------------

    def _close_step(self, membership: Membership) -> StepBatch:
        """Makes this shard's part of a step, and gives up the groups that the step consumes.

        membership: of the step, over all shards.
        """
        self._ledger.close(membership.consumed)
        self._ledger.give_back(membership.surplus, membership.carried)
        own = self._settled_of(membership.consumed)
        surplus = self._settled_of(membership.surplus)
        carried = {one.ordinal for one in surplus}.intersection(membership.carried)
        counts = Counter(surplus=len(surplus), surplus_carried=len(carried))
        if self._agree.lead:
            counts["issued"] = membership.issued
            counts["rounds"] = membership.rounds
        groups = self._groups_taken(own, surplus, counts)
        teaches = bool(membership.trained)
        self._too_long = latest_too_long([*self._too_long, *own])
        if not teaches:
            check_any_fits(self._too_long)
        if self._schedule.runs_on:
            self._note_metrics(membership)
        return StepBatch(
            step=membership.step,
            groups=groups,
            teaches=teaches,
            counts=counts,
            carried=self._ledger.held_records(),
            first_ordinal=membership.first_ordinal,
            oldest=self._schedule.oldest,
            next_ordinal=self._schedule.consumed,
            state=self._present_state(),
            digests=_digests(own),
        )

    def _settled_of(self, ordinals: Sequence[int]) -> list[Verdict]:
        """Takes this shard's groups of these ordinals out of those that no step has taken."""
        return [self._settled.pop(o) for o in ordinals if o in self._settled]

    def _groups_taken(
        self, own: list[Verdict], surplus: list[Verdict], counts: Counter[str]
    ) -> list[list[Header]]:
        """Picks the groups that the step trains on; counts and traces what became of each group.

        own: this shard's groups that the step consumes.
        surplus: those that it gives back.
        counts: gets the counts of the step's report.
        """
        trace = self._context.trace
        groups = []
        records = list[RecordTrace]()
        for one in own:
            if one.verdict == TRAINED:
                groups.append(one.group)
            else:
                counts[f"dropped/{one.reason}"] += 1
            records += trace.settled(one.group, one.verdict, one.reason)
        for one in surplus:
            records += trace.settled(one.group, "surplus", one.reason)
        if not self._schedule.runs_on:
            self._placement.end_rollout(records)
        trace.flush()
        counts["kept"] = len(groups)
        return groups

    # -- only where production runs on (``Schedule.runs_on``) --------------------------------------

    async def drain(self) -> None:
        """Returns when no sample of any shard is in flight.

        None is begun before ``note_published``, and every sample is scored. Where devices move,
        this shard also asks no replica and no scorer any more.

        Raises what failed in producing.
        """
        self._push_waits = True
        self._wake.set()
        await self._until(self._is_quiet)
        if self._placement.moves:
            await self._end_draws()

    def check_push(self) -> None:
        """Raises ContractError where a push would cut samples that cannot go on through it."""
        facts = self._context.facts
        if not self._schedule.runs_on or self._push_waits or facts.midway_weights:
            return
        raise ContractError(
            f"controller {facts.providers.get('controller', '')} pushes while samples run, and "
            f"{facts.providers.get(f'roles.{ROLLOUT}', 'the generator')} is not known to go on "
            "with them.",
            where="push",
            todo="take a generator with the trait midway_weights, such as torch; or the program "
            "calls Producer.drain before each push",
        )

    def seal(self, taken: StepBatch) -> StepBatch:
        """Returns ``taken`` with what a checkpoint behind its step holds, as of now.

        It holds the records of all groups that are complete, can be used, and are not taken. A run
        that goes on from it redraws all others.
        """
        schedule = self._schedule
        self._metrics |= {
            "window/groups": float(schedule.begun),
            "window/in_flight": float(schedule.in_flight),
        }
        return replace(
            taken,
            carried=self._ledger.held_records(),
            oldest=schedule.oldest,
            state=self._present_state(),
        )

    async def stop(self) -> None:
        """Ends production; what is in flight is given up."""
        tasks = [*self._draws] if self._task is None else [self._task, *self._draws]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the step that was taken last, over all shards; seconds are this shard's.

        It is empty where production does not run on.

        Those that begin with ``window/`` are as of ``seal``.
        """
        return self._metrics

    async def _await_step(self) -> StepBatch | None:
        """Waits until the production that runs on has the groups of a step."""
        if self._task is None:
            self._begin_rollout()
            self._task = asyncio.ensure_future(self._run())
        self._wake.set()
        await self._until(self._has_taken)
        self._has_taken.clear()
        taken, self._taken = self._taken, None
        return taken

    async def _run(self) -> None:
        """Looks, closes a step, begins groups and pauses, over and over, until it is cancelled.

        Raises what failed in drawing, and TrainingError when too many groups cannot be used.
        """
        while True:
            await self._look()
            if self._taken is None and (membership := self._schedule.take_if_ready()) is not None:
                self._taken = self._close_step(membership)
                self._has_taken.set()
            self._begin_groups()
            self._note_quiet()
            await self._pause()

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

    def _is_behind(self) -> bool:
        """Whether other shards were not yet where this one is, when all looked."""
        schedule = self._schedule
        return schedule.version < self._version or schedule.wanted < self._wanted

    def _group_has_ended(self) -> None:
        """Wakes the loop if all of this shard's part of the wanted step is complete.

        It is called whenever a group of this shard has become complete.
        """
        part = self._schedule.next_part()
        if part and not any(self._ledger.is_open(ordinal) for ordinal in part):
            self._wake.set()

    def _note_quiet(self) -> None:
        """Notes whether nothing is in flight, and nothing is begun before the next push."""
        if self._schedule.in_flight or self._is_behind():
            self._is_quiet.clear()
            return
        if not self._is_quiet.is_set():
            self._placement.end_rollout(self._rollout)
        self._is_quiet.set()

    async def _end_draws(self) -> None:
        """Ends the draws that still run although every group is whole.

        A request may outlast its last record, such as an empty part of a round, or one to a process
        that was lost meanwhile. Its replica may be about to sleep.
        """
        draws = list(self._draws)
        for drawing in draws:
            drawing.cancel()
        await asyncio.gather(*draws, return_exceptions=True)

    def _note_metrics(self, membership: Membership) -> None:
        self._note_idle()
        self._metrics = {"seconds/no_draws": self._idle_s}
        self._idle_s = 0.0
        step = membership.step
        trained = membership.trained
        if trained:
            self._metrics |= {
                "age/mean": step - float(np.mean([one.mean_first for one in trained])),
                "age/largest": float(step - min(one.first for one in trained)),
                "age/spanning_share": float(np.mean([one.spanning for one in trained])),
            }


def _check_ages(schedule: Schedule, facts: JobFacts) -> None:
    """Raises ConfigError where steps train on older records and no loss corrects for that."""
    objective = facts.providers.get("objective")
    if objective and schedule.bounds.age and not facts.takes_stale:
        raise ConfigError(
            f"{objective} does not correct for actions that older weights sampled, and controller "
            f"{facts.providers['controller']} trains on such actions.",
            where="objective",
            todo="choose an objective, or settings of it, with the trait takes_stale",
        )


def _told(one: Verdict) -> GroupReport:
    """Returns what all shards are told of a group that has its verdict."""
    versions = [header.versions for header in one.group]
    return GroupReport(
        ordinal=one.ordinal,
        teaches=one.verdict == TRAINED,
        unusable=one.verdict == QUARANTINED,
        first=min(first for first, _ in versions),
        mean_first=sum(first for first, _ in versions) / len(versions),
        spanning=sum(first != last for first, last in versions) / len(versions),
        whole=all(header.status != FAILED for header in one.group),
    )


def _digests(taken: Sequence[Verdict]) -> dict[str, int]:
    """Returns ``StepBatch.digests`` of these groups."""
    headers = [header for one in taken for header in one.group]
    return {
        "generation": sum_of(map(generation_digest, headers)),
        "rewarding": sum_of(map(rewarding_digest, headers)),
    }
