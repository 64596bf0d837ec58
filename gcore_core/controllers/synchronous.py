"""``core/sync``: generation, rewarding, preparation, training, push; then the next step.

Every shard runs this same program over its own groups. ``step`` is the whole of it; the rest is in
its three parts: ``Rollout`` (generation and rewarding), ``Training`` (balance, preparation,
training) and ``Publishing`` (the push).
"""

from __future__ import annotations

import asyncio
from typing import Any

from gcore_core.controllers.checkpointing import Checkpointing, Stopped, unless
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.evaluation import Evaluation
from gcore_core.controllers.ledger import Ledger
from gcore_core.controllers.placement.shard import Placing
from gcore_core.controllers.publishing import Publishing
from gcore_core.controllers.reporting import Reporting
from gcore_core.controllers.rollout import Rollout
from gcore_core.controllers.tracing import Trace
from gcore_core.controllers.training import Training, learned_costs, restore_costs


class SynchronousController:
    def __init__(self, config: SyncConfig, context: ControllerContext) -> None:
        facts = context.facts
        self._context, self._config = context, config
        self._ledger = Ledger(
            shard=facts.shard,
            shards=facts.shards,
            rows=facts.rows["train"],
            seed=facts.run.seed,
            samples=context.advantage.group_size,
            next_ordinal=facts.next_ordinal,
        )
        self._placing = Placing(context)
        self._rollout = Rollout(context, config, self._placing)
        self._training = Training(context, config)
        self._publishing = Publishing(context, config, self._placing)
        self._reporting = Reporting(context)
        self._evaluation = Evaluation(context, self._rollout)
        self._rollout.quota.restore(context.facts.state.get("quota", {}))
        if self._rollout.quota.carries:
            self._ledger.carry(context.facts.carried)
        restore_costs(context.balancer, context.facts.state.get("balance", {}))
        self._checkpointing = Checkpointing(context, self._state())

    async def run(self) -> None:
        facts, stopping = self._context.facts, self._context.stopping
        try:
            await self._placing.at(facts.start_step, facts.start_step)
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
        """One pass of the four stages and one push; whether it was the last one.

        Raises Stopped when the run is to end before: in the lead at any time at which the trainers
        hold what a step left, in all shards when a step has ended.
        """
        stopping = self._context.stopping
        watch = Stopwatch(self._context.trace, step)
        groups, counts = await unless(stopping, self._rollout.groups(self._ledger, step))
        watch.lap("rollout")
        await self._placing.rest()
        plan = await self._training.balance(step, groups)
        scalars = await self._training.prepare(step, groups, plan)
        advantages = await self._training.advantages(groups, scalars)
        watch.lap("prepare")
        if stopping.is_set():
            raise Stopped
        trained = await self._training.train(step, advantages, plan)
        watch.lap("train")
        await self._checkpointing.carry(step + 1, self._ledger.carried_records())
        await self._placing.at(step + 1, self._rollout.oldest(step + 1))
        ends = await self._publishing.publish(step + 1, self._rollout.oldest(step + 1))
        watch.lap("push")
        verdicts = self._ledger.commit()
        facts = self._context.facts
        last = step + 1 == facts.run.steps or self._ledger.next_ordinal >= facts.last_ordinal
        metrics = trained | watch.metrics() | self._placing.metrics
        metrics |= await self._checkpointing.at(step + 1, self._state(), metrics, last or ends)
        watch.go_on()
        evaluated = None if ends else await unless(stopping, self._evaluation.at(step + 1, last))
        watch.lap("evaluation")
        mine = self._reporting.summary(groups, counts, verdicts, evaluated)
        await self._reporting.end(step + 1, mine, metrics | watch.metrics(), self._ledger.state())
        if ends:
            raise Stopped
        return last

    def _state(self) -> dict[str, Any]:
        """What a resumed run goes on with, besides the trainers' part; plain values."""
        return {
            "ledger": self._ledger.state(),
            "quota": self._rollout.quota.state(),
            "placement": self._placing.state(),
            "balance": learned_costs(self._context.balancer),
        }


class Stopwatch:
    """Seconds of each stage of a step, by the clock of the event loop."""

    def __init__(self, trace: Trace, step: int) -> None:
        self.laps_s: dict[str, float] = {}
        self._trace, self._step = trace, step
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()

    def lap(self, name: str) -> None:
        before_s, self._last_s = self._last_s, self._loop.time()
        self.laps_s[name] = self._last_s - before_s
        self._trace.stage(self._step, name, before_s, self._last_s)

    def go_on(self) -> None:
        """What came since the last lap belongs to none."""
        self._last_s = self._loop.time()

    def metrics(self) -> dict[str, float]:
        stages = {name: value for name, value in self.laps_s.items() if name != "evaluation"}
        return {f"seconds/{name}": value for name, value in self.laps_s.items()} | {
            "seconds/step": sum(stages.values())
        }
