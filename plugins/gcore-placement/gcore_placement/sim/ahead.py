"""Simulates a run whose generation goes on while it trains, without any process.

What decides in a run decides here too: ``Ahead`` says which groups are begun when and which a
step takes, ``deal`` which replica draws them, and ``ContinuousBatch`` when their answers end. The
trainer is a server of its own that takes one step after the other, and a push is a pause of all
engines. With ``ahead`` 0 it is a synchronous run.

    trainer   waits for its groups | trains | waits until nothing runs | pushes
    engines   sample               | sample | sample                   | pause, read again

The two waits of the trainer are its idle time. The second is there only where a push waits for
samples that run.

For example ``ahead`` 1, with pushes that wait for samples, 10 s to sample groups however many run,
4 s to train and 3 s to push:

     0 s   the groups of steps 0 and 1 begin
    10 s   all have ended; step 0 takes its own and trains
    14 s   trained; nothing runs, so it pushes
    17 s   step 0 is over; step 1 takes its groups at once, and those of step 2 begin
    21 s   trained; the push waits for the groups of step 2
    27 s   they have ended; it pushes
    30 s   step 1 is over, after 13 s: 4 s of training, 6 s of the second wait, 3 s of the push

Where generative judges score answers, they are engines of their own, which no push stops:

    engines   ... an answer ends |
    judges                       | a question about it | the next question | then it has its rewards
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gcore_core.contract.engine_profiles import Profile
from gcore_core.contract.records import Lease
from gcore_core.kits.programs import Ahead, Bounds, GroupReport, Membership, deal
from gcore_placement.sim.batching import ContinuousBatch, Key
from gcore_placement.sim.config import EngineProfile

#: Steps whose groups may be begun for one that keeps none of them.
_MOST_ROUNDS = 64


@dataclass(frozen=True)
class Asking:
    """Describes one question to a judge.

    role: the judge's.
    prompt: tokens that the judge reads.
    verdict: tokens that it writes.
    """

    role: str
    prompt: int
    verdict: int


#: The questions about one answer, in rounds: those of one round are asked at once, and a round
#: begins when all verdicts of the one before it are there.
Rounds = Sequence[Sequence[Asking]]


class AnswerSource(Protocol):
    """Says how long everything about a group is."""

    def group(self, ordinal: int) -> GroupLengths:
        """Returns a group's lengths; the same for the same ordinal."""


@dataclass(frozen=True)
class GroupLengths:
    """Holds the lengths of one group, in tokens.

    prompt: tokens of its prompt.
    answers: tokens of each of its answers.
    teaches: whether a step may train on it.
    asked: of each answer, the questions to judges about it; empty where no judge is asked.
    """

    prompt: int
    answers: Sequence[int]
    teaches: bool = True
    asked: Sequence[Rounds] = ()


@dataclass(frozen=True, kw_only=True)
class TrainerPace:
    """Says how long a step of training takes, with its preparation.

    fixed_s: seconds whatever the number of ranks.
    record_s: seconds of one rank for a record.
    token_s: seconds of one rank for a token, prompt or answer.
    """

    fixed_s: float = 0.0
    record_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, groups: Iterable[GroupLengths], ranks: int) -> float:
        """Returns the seconds of a step. A rank has a whole number of records, and all tokens are
        shared evenly.
        """
        records = 0
        tokens = 0
        for group in groups:
            records += len(group.answers)
            tokens += len(group.answers) * group.prompt + sum(group.answers)
        return (
            self.fixed_s
            + self.record_s * math.ceil(records / ranks)
            + self.token_s * tokens / ranks
        )


@dataclass(frozen=True, kw_only=True)
class AheadJob:
    """Describes what a run does, whatever it runs on.

    prompts: groups that a step trains on.
    ahead, age: see ``gcore_core.controllers.generation.ahead``.
    waits: whether a push waits for samples that run; else they go on and are read again.
    profile: the engine of a replica.
    trainer: what training takes.
    push_s: seconds of a push.
    reward_s: seconds between the end of a group's last answer, or of the last verdict of a judge on
        it, and its last reward.
    judges: role of a judge -> the engine of its replica.
    asks_groups: whether judges are asked when a group has all its answers, not as each one ends.
    prefix_cache: whether a group's prompt is read once, not for each of its answers.
    """

    prompts: int
    ahead: int = 1
    age: int = 4
    waits: bool = True
    profile: Profile | EngineProfile = field(default_factory=Profile)
    trainer: TrainerPace = field(default_factory=TrainerPace)
    push_s: float = 0.0
    reward_s: float = 0.0
    judges: Mapping[str, Profile | EngineProfile] = field(default_factory=dict)
    asks_groups: bool = False
    prefix_cache: bool = True


@dataclass(frozen=True)
class Layout:
    """Says how many engines and ranks there are, and which of them share devices.

    replicas: engines of the policy.
    ranks: ranks of the trainer.
    shared: whether the trainer is on the devices of all engines, which it uses in turns with them;
        only with ``ahead`` 0.
    switch_s: seconds that changing from one use to the other and back takes in each step,
        where they are shared.
    shards: controllers.
    judges: role of a judge -> its engines.
    """

    replicas: int
    ranks: int
    shared: bool = False
    switch_s: float = 0.0
    shards: int = 1
    judges: Mapping[str, int] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """The number of units of devices that it needs, where an engine and a rank have one."""
        engines = self.replicas + sum(self.judges.values())
        return max(engines, self.ranks) if self.shared else engines + self.ranks


@dataclass(frozen=True, kw_only=True)
class AheadStep:
    """Holds what one step took, in seconds.

    seconds: from the end of the step before to the end of its push.
    waited_s: the trainer waited for groups.
    drained_s: the trainer waited for samples to end, before its push.
    trained_s, pushed_s: training with its preparation, and the push.
    idle_share: share of the time of the generators' engines in which they had nothing to run,
        pushes left out.
    judges_idle_share: the same of the judges' engines, of the whole step; 0 without judges.
    age_mean, age_largest: versions between what began a group and the step that took it.
    """

    seconds: float
    waited_s: float
    drained_s: float
    trained_s: float
    pushed_s: float
    idle_share: float
    judges_idle_share: float
    age_mean: float
    age_largest: int


def simulate_ahead(
    job: AheadJob,
    layout: Layout,
    source: AnswerSource,
    steps: int,
    make: Callable[..., Ahead] = Ahead,
) -> list[AheadStep]:
    """Returns what each step takes. The same arguments give the same steps.

    Raises ValueError where a judge has no engine.

    make: makes the rule of what is begun and taken, from the arguments of ``Ahead``.
    """
    return _Run(job, layout, source, steps, make).steps()


class _Engine:
    """One replica: a batch, and the time up to which it has been played.

    has_ended: called by the run with each sample that has ended.
    """

    def __init__(
        self,
        profile: Profile | EngineProfile,
        prefix_cache: bool,
        has_ended: Callable[[Key], None],
    ) -> None:
        terms = {name: getattr(profile, name) for name in Profile.__dataclass_fields__}
        self._batch = ContinuousBatch(EngineProfile(**terms), prefix_cache)
        self.has_ended = has_ended
        self._now_s = 0.0
        self.busy_s = 0.0
        self.next_s = math.inf  # when its next answer ends
        self._ended: list[Key] = []

    def add(self, now_s: float, samples: Iterable[tuple[Key, int, int]]) -> None:
        """Takes samples, each with the tokens of its prompt and its answer."""
        self._play(now_s)
        for key, prompt, answer in samples:
            self._batch.add(key, prompt, answer)
        self._foresee()

    def end_next(self) -> list[Key]:
        """Goes on until ``next_s``; returns the samples that have ended since the last call."""
        self._play(self.next_s)
        ended = self._ended
        self._ended = []
        self._foresee()
        return ended

    @property
    def load(self) -> int:
        """The number of samples that it has, those that wait for a place included."""
        return self._batch.running + self._batch.waiting

    def pause(self, now_s: float, until_s: float) -> None:
        """Takes a push, and reads what runs again."""
        self._play(now_s)
        self._batch.forget_cache()
        self._now_s = max(self._now_s, until_s)
        self._foresee()

    def busy_until(self, now_s: float) -> float:
        """Returns ``busy_s`` as of now, to the end of a token."""
        self._play(now_s)
        self._foresee()
        return self.busy_s

    def _play(self, until_s: float) -> None:
        """Goes on until about a time: to the end of a token, in which samples may end.

        Those that have ended wait in ``_ended`` for ``end_next``.
        """
        while self._now_s < until_s:
            seconds, keys = self._batch.advance(until_s - self._now_s)
            if seconds == 0:
                self._now_s = until_s  # it has nothing to do
            self._now_s += seconds
            self.busy_s += seconds
            self._ended += keys

    def _foresee(self) -> None:
        """Sets ``next_s``, after whatever may have changed it."""
        if self._ended:  # at the end of a token, just behind what was asked for
            self.next_s = self._now_s
        else:
            self.next_s = self._now_s + self._batch.seconds_to_end()


@dataclass
class _Part:
    """A request to a replica: what it still waits for, and the queue of its lane."""

    missing: int
    lane: tuple[int, deque[list[Lease]]]


@dataclass
class _Examined:
    """An answer about which judges are asked.

    key: its own.
    later: the rounds of questions that follow the present one.
    missing: verdicts that the present round still lacks.
    """

    key: Key
    later: deque[Sequence[Asking]]
    missing: int = 0


class _Run:
    """One simulated run, on virtual time.

    ``steps`` goes from event to event. There are two kinds of them:

    - an answer ends at an engine; each engine says when its next one does (``_Engine.next_s``);
    - something is due that was put off for some seconds (``_after``).

    Each event sets ``_now_s`` to its time, and calls one method:

        event                  method                what follows
        an answer ends         _sample_has_ended     the lane's next part begins; with the last
                                                     answer of a group, its rewards are put off;
                                                     where judges score it, they are asked first
        a verdict ends         _verdict_has_ended    the next round of questions about the answer;
                                                     with the last one of a group, as above
        rewards are there      _group_has_ended      _look
        training is over       _drain                the push begins, now or when nothing runs
        the push is over       _end_step             a row is written, the version goes up, _look

    Decisions are made in ``_look``, as all shards make them together in a run: a step takes its
    groups (``_train``), groups are begun (``_begin``), a push that waited goes on (``_push``).
    """

    def __init__(
        self,
        job: AheadJob,
        layout: Layout,
        source: AnswerSource,
        steps: int,
        make: Callable[..., Ahead],
    ) -> None:
        bounds = Bounds(
            prompts=job.prompts,
            ahead=job.ahead,
            age=job.age,
            limit=_MOST_ROUNDS * job.prompts,
            exact=False,
            steps=steps,
        )
        # What is simulated.
        self._job = job
        self._layout = layout
        self._source = source
        self._n_steps = steps
        self._schedule = make(bounds=bounds, step=0, base=0)
        self._schedule.wanted = 0
        self._engines = [
            _Engine(job.profile, job.prefix_cache, self._sample_has_ended)
            for _ in range(layout.replicas)
        ]
        for role in job.judges:
            if layout.judges.get(role, 0) < 1:
                raise ValueError(f"the judge {role!r} has no engine in {layout}")
        # Judges. Questions are about different answers, so none shares what it reads with another.
        self._judges = {
            role: [
                _Engine(job.judges[role], False, self._verdict_has_ended) for _ in range(replicas)
            ]
            for role, replicas in layout.judges.items()
        }
        self._examined: dict[Key, _Examined] = {}  # key of a question -> the answer it is about
        self._questions = 0
        self._all = [*self._engines, *itertools.chain.from_iterable(self._judges.values())]
        # The clock, and what was put off: (seconds, a number that keeps the order, what to do).
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        # Generation. A key is (ordinal of a group, number of a sample).
        self._missing = Counter[int]()  # answers that a group still lacks
        self._unjudged = Counter[int]()  # answers of a group that judges have not answered about
        self._parts: dict[Key, _Part] = {}
        self._lengths: dict[int, GroupLengths] = {}
        self._began: dict[int, int] = {}  # ordinal -> version
        # The trainer. It has taken the groups of a step exactly while ``_membership`` is not None.
        self._rows: list[AheadStep] = []
        self._drains = False  # it waits with its push until nothing runs
        self._membership: Membership | None = None
        # Seconds at which this step began, took its groups, was trained, and began to push.
        self._marks: dict[str, float] = {"begun": 0.0}
        # Seconds of work of the generators' engines and of judges, up to the end of the step
        # before.
        self._busy_s = 0.0
        self._judged_s = 0.0

    def steps(self) -> list[AheadStep]:
        """Plays all steps."""
        self._look([])
        while len(self._rows) < self._n_steps:
            engine = min(self._all, key=lambda engine: engine.next_s)
            event_s = self._events[0][0] if self._events else math.inf
            if math.isinf(min(engine.next_s, event_s)):
                raise RuntimeError("nothing runs, and the step has not got its groups")
            if engine.next_s < event_s:
                self._now_s = engine.next_s
                for key in engine.end_next():
                    engine.has_ended(key)
            else:
                self._now_s, _, act = heapq.heappop(self._events)
                act()
        return self._rows

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        """Puts off what is to be done, by some seconds. What is due together keeps its order."""
        self._count += 1
        heapq.heappush(self._events, (self._now_s + seconds, self._count, act))

    # -- generation --------------------------------------------------------------------------------

    def _look(self, told: list[GroupReport]) -> None:
        """Does what follows from what has ended, as all shards do when they look together."""
        schedule = self._schedule
        schedule.look(schedule.version, schedule.wanted, told, push_waits=self._drains)
        if self._membership is None and (membership := schedule.take_if_ready()) is not None:
            self._membership = membership
            self._train(membership)
        if ordinals := schedule.issue():
            self._begin(ordinals)
        if self._drains and not schedule.in_flight:
            self._drains = False
            self._push()

    def _begin(self, ordinals: Sequence[int]) -> None:
        """Begins groups: each shard deals its own to the engines, as in a run."""
        layout = self._layout
        for ordinal in ordinals:
            lengths = self._source.group(ordinal)
            self._lengths[ordinal] = lengths
            self._began[ordinal] = self._schedule.version
            self._missing[ordinal] = len(lengths.answers)
            self._unjudged[ordinal] = len(lengths.answers)
        for shard in range(layout.shards):
            leases = [
                Lease(ordinal, 0, 0, tuple(range(len(self._lengths[ordinal].answers))))
                for ordinal in ordinals
                if ordinal % layout.shards == shard
            ]
            is_fixed = layout.replicas == 1
            for lane in deal(leases, layout.replicas, shard, layout.shards, is_fixed):
                self._next_part(lane)

    def _next_part(self, lane: tuple[int, deque[list[Lease]]]) -> None:
        """Gives a lane's replica the next part of its queue, if there is one.

        lane: (number of an engine, the queue of parts that it shares with other lanes).
        """
        replica, waiting = lane
        if not waiting:
            return
        leases = waiting.popleft()
        keys = [(lease.ordinal, sample) for lease in leases for sample in lease.samples]
        part = _Part(len(keys), lane)
        self._parts |= dict.fromkeys(keys, part)
        self._engines[replica].add(self._now_s, [self._sized(key) for key in keys])

    def _sized(self, key: Key) -> tuple[Key, int, int]:
        """Returns a sample with the tokens that an engine must read for it, and sample of it."""
        lengths = self._lengths[key[0]]
        return key, lengths.prompt, lengths.answers[key[1]]

    def _sample_has_ended(self, key: Key) -> None:
        """A sample has ended: maybe its part is over, and maybe its group has all answers."""
        part = self._parts.pop(key)
        part.missing -= 1
        if not part.missing:
            self._next_part(part.lane)
        ordinal = key[0]
        self._missing[ordinal] -= 1
        if not self._missing[ordinal]:
            del self._missing[ordinal]
        if not self._job.asks_groups:
            self._ask(key)
        elif ordinal not in self._missing:
            for sample in range(len(self._lengths[ordinal].answers)):
                self._ask((ordinal, sample))

    # -- judges ------------------------------------------------------------------------------------

    def _ask(self, key: Key) -> None:
        """Asks the first round of questions about an answer."""
        asked = self._lengths[key[0]].asked
        self._next_round(_Examined(key, deque(asked[key[1]] if asked else ())))

    def _next_round(self, examined: _Examined) -> None:
        """Asks the next round of questions about an answer; behind the last one, it is judged.

        Each question goes to the engine that has the fewest, as in a run.
        """
        ordinal = examined.key[0]
        if not examined.later:
            self._unjudged[ordinal] -= 1
            if not self._unjudged[ordinal]:
                del self._unjudged[ordinal]
                self._after(self._job.reward_s, lambda: self._group_has_ended(ordinal))
            return
        questions = examined.later.popleft()
        examined.missing = len(questions)
        if not questions:
            self._next_round(examined)
        for question in questions:
            self._questions += 1
            key = (ordinal, self._questions)
            self._examined[key] = examined
            engine = min(self._judges[question.role], key=lambda one: one.load)
            engine.add(self._now_s, [(key, question.prompt, question.verdict)])

    def _verdict_has_ended(self, key: Key) -> None:
        """A judge has answered a question."""
        examined = self._examined.pop(key)
        examined.missing -= 1
        if not examined.missing:
            self._next_round(examined)

    # -- what ends a group -------------------------------------------------------------------------

    def _group_has_ended(self, ordinal: int) -> None:
        """A group has all of its rewards."""
        begun = self._began[ordinal]
        teaches = self._lengths[ordinal].teaches
        self._look([GroupReport(ordinal, teaches, False, begun, float(begun), 0.0)])

    # -- the trainer -------------------------------------------------------------------------------

    def _train(self, membership: Membership) -> None:
        """Trains on the groups that a step has taken."""
        groups = [self._lengths[one.ordinal] for one in membership.trained]
        self._marks["taken"] = self._now_s
        seconds = self._job.trainer.seconds(groups, self._layout.ranks) if groups else 0.0
        switch_s = self._layout.switch_s if self._layout.shared else 0.0
        self._after(seconds + switch_s, self._drain)

    def _drain(self) -> None:
        """Has been trained: pushes, at once or when nothing runs."""
        self._marks["trained"] = self._now_s
        if self._job.waits and self._schedule.in_flight:
            self._drains = True
        else:
            self._push()

    def _push(self) -> None:
        """Pushes to all engines; meanwhile none of them samples."""
        self._marks["drained"] = self._now_s
        for engine in self._engines:
            engine.pause(self._now_s, self._now_s + self._job.push_s)
        self._after(self._job.push_s, self._end_step)

    def _end_step(self) -> None:
        """A push is over, and with it a step: the next one may take its groups."""
        assert self._membership is not None
        self._rows.append(self._row(self._membership))
        self._marks["begun"] = self._now_s
        for ordinal in self._membership.consumed:
            del self._lengths[ordinal]
        self._membership = None
        self._schedule.version += 1
        self._schedule.wanted += 1
        self._look([])

    def _row(self, membership: Membership) -> AheadStep:
        """Returns what the step took that ends now, and begins to count anew."""
        marks = self._marks
        seconds = self._now_s - marks["begun"]
        ages = [len(self._rows) - one.first for one in membership.trained] or [0]
        busy_s = sum(engine.busy_s for engine in self._engines)
        pushed_s = self._now_s - marks["drained"]
        could_run_s = len(self._engines) * max(seconds - pushed_s, 1e-12)
        judges = [engine for engines in self._judges.values() for engine in engines]
        judged_s = sum(engine.busy_until(self._now_s) for engine in judges)
        could_judge_s = max(len(judges) * seconds, 1e-12)
        judges_idle = 1 - (judged_s - self._judged_s) / could_judge_s if judges else 0.0
        self._judged_s = judged_s
        idle = 1 - (busy_s - self._busy_s) / could_run_s
        self._busy_s = busy_s
        return AheadStep(
            seconds=seconds,
            waited_s=marks["taken"] - marks["begun"],
            trained_s=marks["trained"] - marks["taken"],
            drained_s=marks["drained"] - marks["trained"],
            pushed_s=pushed_s,
            idle_share=min(max(idle, 0.0), 1.0),
            judges_idle_share=min(max(judges_idle, 0.0), 1.0),
            age_mean=float(np.mean(ages)),
            age_largest=max(ages),
        )


def mean_seconds(steps: Sequence[AheadStep], skip: int) -> float:
    """Returns the mean seconds of a step, without the first ``skip``."""
    return float(np.mean([step.seconds for step in steps[skip:]]))


def summarize(steps: Sequence[AheadStep], skip: int) -> dict[str, Any]:
    """Returns means over all steps but the first ``skip``, and the largest age of all steps."""
    names = [name for name in AheadStep.__dataclass_fields__ if name != "age_largest"]
    later = steps[skip:]
    means = {name: float(np.mean([getattr(step, name) for step in later])) for name in names}
    return {**means, "age_largest": max(step.age_largest for step in steps)}
