"""What every step program does: how a run begins and ends, and the two halves of a step that come
after its groups. A program of one's own derives from ``StepProgram`` and says what a step is.

The stages of a step, in order. Each ends with a *lap* of the step's ``Stopwatch``: its seconds are
the metric ``seconds/<lap>``. Its digests are sums over all shards, and show where two runs part:

    stage         what happens                  method   lap         digests
    rollout       groups are drawn and scored   take     rollout     generation, rewarding
    preparation   balance, prepare, advantages  train    prepare     preparation
    training      the updates                   train    train       training
    push          placement, push of weights    end      push        weights
    (no stage)    save, evaluate, report        end      evaluation

``contract.run_files`` has the names of the stages in reports (``STAGES``) and of the digests
(``DIGESTS``). A program may have further laps: reports put these behind the others.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from gcore_core.contract.errors import GcoreError, WeightMismatch, WorkerDied
from gcore_core.controllers.checkpointing import Checkpointing, Stopped, unless
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.evaluation import Evaluates, RewardEvaluation
from gcore_core.controllers.generation import InStep, Producer, Schedule, StepBatch
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.placement.sleepers import sleep_trainers
from gcore_core.controllers.publishing import Publishing, Releasing
from gcore_core.controllers.reporting import Reporting
from gcore_core.controllers.tracing import Stopwatch
from gcore_core.controllers.training import Training


class StepProgram(ABC):
    """One shard of a step program, made of the parts of ``gcore_core.controllers``.

    All shards call the same methods in the same order. A program overrides ``step``, and any other
    method whose order it changes.

    A step in which no shard has a group to train on is skipped: it draws, pushes and reports like
    any other, and its weights stay as they were.

    skipped: how many steps in a row were skipped, with the one that was taken last.
    pushes: whether generators follow the policy. Where they hold no weights, a step ends without a
        push.
    """

    pushes: ClassVar[bool] = True

    def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
        self.context = context
        self.placement = PlacementShard(context)
        self.producer = Producer(context, config, self.placement, self.make_schedule(config))
        self.training = Training(context, config)
        publishing = Publishing if self.pushes else Releasing
        self.publishing = publishing(context, config, self.placement)
        self.evaluation = self.make_evaluation()
        self.reporting = Reporting(context)
        self.skipped = int(context.facts.state.get("skipped", 0))
        self._max_skipped = config.max_skipped_steps
        self.checkpointing = Checkpointing(context, self.state())

    def make_schedule(self, config: SyncConfig) -> Schedule:
        """Returns what decides which groups are begun when; by default the groups of one step."""
        return InStep.of(config, self.context.facts)

    def make_evaluation(self) -> Evaluates:
        """Returns what evaluates weights; by default on records that generators draw of them."""
        return RewardEvaluation(self.context, self.placement)

    @abstractmethod
    async def step(self, step: int) -> bool:
        """Takes a step's groups, trains on them and pushes; returns whether the run ends here.

        Raises Stopped when the run is to end before: in the lead at any time at which the trainers
        hold what a step left, in all shards when a step has ended.
        """

    async def run(self) -> None:
        """Pushes the weights that the run begins with, then goes from step to step to its end.

        A run that is told to stop saves a checkpoint and returns; it does not raise.
        """
        facts = self.context.facts
        stopping = self.context.stopping
        try:
            await self.placement.decide(facts.start_step, facts.start_step)
            await self.publishing.publish(facts.start_step, facts.start_step)
            await sleep_trainers(self.context)
            digests = self.publishing.digests()
            # A run that goes on may have made all its steps, and have ended without its weights.
            over = self._over()
            # Until the other shards have evaluated, too.
            async with self.context.trainers_free():
                evaluated = await unless(stopping, self.evaluation.at(facts.start_step, False))
                await self.reporting.begin(facts.start_step, evaluated, digests, over)
            for step in range(facts.start_step, facts.run.steps) if not over else ():
                if await self.step(step):
                    break
            await self._save()
        except Stopped:
            await self.checkpointing.flush()
        finally:
            self.training.watching.end()
        self.context.trace.flush()

    def _over(self) -> list[str]:
        """Says why a run that goes on has no step to make; empty where it has one."""
        facts = self.context.facts
        if facts.start_step >= facts.run.steps:
            why = f"run.steps is {facts.run.steps}"
        elif facts.next_ordinal >= facts.last_ordinal:
            why = "its epochs of the data are over (run.epochs)"
        else:
            return []
        return [f"the run makes no more steps, since {why}; its final weights are those of now"]

    async def _save(self) -> None:
        """Saves the final weights; after an error of theirs the run's state, at least."""
        try:
            await self.publishing.save()
        except WorkerDied:
            raise
        except GcoreError:
            with contextlib.suppress(GcoreError):
                await self.checkpointing.flush()
            raise

    async def take(self, step: int) -> StepBatch:
        """Returns the groups of a step. Raises Stopped when the run is to end before."""
        taken = await unless(self.context.stopping, self.producer.take(step))
        self.skipped = 0 if taken.teaches else self.skipped + 1
        return taken

    async def train(self, step: int, taken: StepBatch, watch: Stopwatch) -> dict[str, float]:
        """Prepares the groups of a step and trains on them; returns the updates' metrics.

        Raises Stopped before the update when the run is to end.
        """
        if not taken.teaches:
            check_metrics = await self._check({})
            return check_metrics | await self._skip(step, watch)
        plans = await self.training.balance(step, taken.groups)
        scalars = await self.training.prepare(step, taken.groups, plans)
        advantages = await self.training.advantages(taken.groups, scalars)
        watch.lap("prepare")
        if self.context.stopping.is_set():
            raise Stopped
        check_metrics = await self._check({})
        await self.publishing.before_update(step + 1)
        try:
            metrics = await self.training.train(step, advantages, plans)
        except WeightMismatch:
            # What the trainers hold now was trained on such records; what is being saved was not.
            await self.checkpointing.settle()
            raise
        watch.lap("train")
        return check_metrics | metrics

    async def _skip(self, step: int, watch: Stopwatch) -> dict[str, float]:
        """Ends a step without a group to train on, in place of ``train``."""
        watch.lap("prepare")
        if self.context.stopping.is_set():
            raise Stopped
        await self.publishing.before_update(step + 1)
        await self.training.skip(step)
        watch.lap("train")
        return {"skipped": float(self.skipped)}

    async def end(
        self, step: int, taken: StepBatch, trained: dict[str, float], watch: Stopwatch
    ) -> bool:
        """Pushes the new weights, then saves, evaluates and reports; whether the run ends here.

        No sample may be in flight when it is called, unless it may have several versions (see
        ``Publishing``).

        trained: what ``train`` returned.

        Raises Stopped in all shards when the run is to end with this step, which is not its last.
        """
        version = step + 1
        await self.checkpointing.carry(version, taken.carried)
        await self.placement.decide(version, taken.oldest)
        if self.pushes:
            self.producer.check_push()
        stops = await self.publishing.publish(version, taken.oldest)
        await self.training.watching.pushed(version)
        watch.lap("push")
        verdicts = self.producer.note_published(taken)
        last = self.is_last(step, taken)
        ordinals = {
            "ordinals/first": float(taken.first_ordinal),
            "ordinals/next": float(taken.next_ordinal),
        }
        metrics = trained | ordinals | watch.metrics() | self.placement.metrics
        if last or stops or self.checkpointing.is_due(version, last or stops):
            # What has been judged is a part of the state.
            metrics = await self._check(metrics)
        metrics |= await self.checkpointing.at(version, self.state(), metrics, last or stops)
        if not last and not stops:
            metrics |= await sleep_trainers(self.context)
        watch.go_on()
        digests = taken.digests | self.training.digests() | self.publishing.digests()
        evaluated = None
        # Until the other shards have evaluated, too.
        async with self.context.trainers_free():
            if not stops:
                evaluated = await unless(self.context.stopping, self.evaluation.at(version, last))
            watch.lap("evaluation")
            summary = self.reporting.summary(
                taken.groups, taken.counts, verdicts, evaluated, digests
            )
            metrics |= watch.metrics()
            ledger = self.state()["ledger"]
            await self.reporting.end(version, summary, metrics, ledger, self._notes(step))
        if last or stops:
            # Now that what the step is measured by is known: it may be the best one.
            await self.checkpointing.settle()
        if stops:
            raise Stopped
        return last

    async def _check(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns a step's metrics with what the step check had still to judge.

        metrics: of the step so far; there are none before its update.

        Raises WeightMismatch, in the lead, at an alarm.
        """
        try:
            return await self.training.watching.before_update(metrics)
        except WeightMismatch:
            # What is being saved was trained on nothing that it is about.
            await self.checkpointing.settle()
            raise

    def is_last(self, step: int, taken: StepBatch) -> bool:
        """Whether the run ends with this step.

        It does with the last of ``run.steps``, where the data set ends, or when too many steps in a
        row had nothing to train on.
        """
        facts = self.context.facts
        return (
            step + 1 == facts.run.steps
            or taken.next_ordinal >= facts.last_ordinal
            or self.skipped >= self._max_skipped
        )

    def _notes(self, step: int) -> list[str]:
        """What a person should know of the step."""
        notes = self.training.watching.notes() if step == self.context.facts.start_step else []
        if not self.skipped:
            return notes
        notes += ["no group was left to train on, so the weights stay as they are"]
        if self.skipped >= self._max_skipped:
            notes.append(
                f"the run ends: {self.skipped} steps in a row had no group to train on "
                "(controller.config.max_skipped_steps)"
            )
        return notes

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with, besides the trainers' part; plain values.

        Records that a program has drawn ahead are not in it: ``Checkpointing.carry`` saves those
        that a resumed run goes on with.
        """
        return {
            **self.producer.state(),
            "skipped": self.skipped,
            "placement": self.placement.state(),
            "balance": self.training.state(),
            "sentinel": self.training.watching.state(),
        }
