"""Generation one step ahead of training.

While the trainer works on a step's records, generators draw the next step's, under the weights that
this step began with. Before the push nothing is in flight: every sample is drawn under one version,
and a record is one version old when it is trained on, those of the first step excepted.
"""

from __future__ import annotations

from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_core.controllers.checkpointing import Checkpointing, Stopped, unless
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.evaluation import Evaluation
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.publishing import Publishing
from gcore_core.controllers.reporting import Reporting
from gcore_core.controllers.tracing import Stopwatch
from gcore_core.controllers.training import Training
from gcore_core.controllers.window import Taken, Window


class OneStepProgram:
    """One shard."""

    def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
        if context.facts.resting:
            raise ConfigError(
                "one-step generates while it trains, and these generators sleep meanwhile.",
                where=f"roles.{context.facts.resting[0]}",
                todo="give them devices of their own, or set placement.sleep_in_training: never",
            )
        self._context = context
        self._placement = PlacementShard(context)
        self._window = Window(context, config, self._placement)
        self._training = Training(context, config)
        self._publishing = Publishing(context, config, self._placement)
        self._evaluation = Evaluation(context, self._placement)
        self._reporting = Reporting(context)
        self._checkpointing = Checkpointing(context, self._state())

    async def run(self) -> None:
        facts, stopping = self._context.facts, self._context.stopping
        try:
            await self._placement.decide(facts.start_step, facts.start_step)
            await self._publishing.publish(facts.start_step, facts.start_step)
            evaluated = await unless(stopping, self._evaluation.at(facts.start_step, False))
            await self._reporting.begin(facts.start_step, evaluated)
            for step in range(facts.start_step, facts.run.steps):
                if await self.step(step):
                    break
            await self._publishing.save()
        except Stopped:
            await self._checkpointing.flush()
        self._context.trace.flush()

    async def step(self, step: int) -> bool:
        """Trains on a step's groups while the next step's are drawn; whether it was the last."""
        facts, stopping = self._context.facts, self._context.stopping
        watch = Stopwatch(self._context.trace, step)
        taken = await unless(stopping, self._window.take(step))
        last = step + 1 == facts.run.steps or taken.next_ordinal >= facts.last_ordinal
        if not last:
            self._window.produce(step + 1, least=step)
        watch.lap("rollout")
        plan = await self._training.balance(step, taken.groups)
        scalars = await self._training.prepare(step, taken.groups, plan)
        advantages = await self._training.advantages(taken.groups, scalars)
        watch.lap("prepare")
        if stopping.is_set():
            raise Stopped
        trained = await self._training.train(step, advantages, plan)
        watch.lap("train")
        # Samples that a push cut in two would be of two versions.
        await self._window.drain()
        return await self._end(step, taken, trained, last, watch)

    async def _end(
        self, step: int, taken: Taken, trained: dict[str, float], last: bool, watch: Stopwatch
    ) -> bool:
        """Pushes the new weights, then saves, evaluates and reports."""
        await self._checkpointing.carry(step + 1, taken.carried)
        await self._placement.decide(step + 1, taken.oldest)
        ends = await self._publishing.publish(step + 1, taken.oldest)
        watch.lap("push")
        verdicts = self._window.commit(taken)
        metrics = trained | watch.metrics() | self._placement.metrics
        metrics |= await self._checkpointing.at(step + 1, self._state(), metrics, last or ends)
        watch.go_on()
        stopping = self._context.stopping
        evaluated = None if ends else await unless(stopping, self._evaluation.at(step + 1, last))
        watch.lap("evaluation")
        summary = self._reporting.summary(taken.groups, taken.counts, verdicts, evaluated)
        metrics |= watch.metrics()
        await self._reporting.end(step + 1, summary, metrics, self._state()["ledger"])
        if ends:
            raise Stopped
        return last

    def _state(self) -> dict[str, Any]:
        """What a resumed run goes on with, besides the trainers' part. What is drawn ahead is not
        in it, and is drawn again.
        """
        return {
            **self._window.state(),
            "placement": self._placement.state(),
            "balance": self._training.state(),
        }
