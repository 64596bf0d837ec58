"""Held-out prompts, drawn greedily and at the training temperature, scored by the same rewards."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gcore_core.contract.records import Header, Lease
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.ledger import Ledger
from gcore_core.controllers.rollout import Rollout
from gcore_core.runtime.messages import GREEDY, SAMPLED

Sums = dict[str, tuple[float, float]]  # name -> (sum, weight); the mean is their quotient


@dataclass
class Evaluated:
    """One shard's part of an evaluation; ``samples`` are a few records to show, by reference."""

    sums: Sums = field(default_factory=dict)
    samples: list[Header] = field(default_factory=list)


class Evaluation:
    def __init__(self, context: ControllerContext, rollout: Rollout) -> None:
        self._context, self._rollout = context, rollout

    async def at(self, version: int, last: bool) -> Evaluated | None:
        """Evaluates weights ``version`` where one is due: at the start, at the end and every so
        many steps.
        """
        facts = self._context.facts
        rows = min(facts.evaluation.prompts, facts.rows.get("evaluation", 0))
        due = (
            last
            or version == facts.start_step
            or (facts.evaluation.every and not version % facts.evaluation.every)
        )
        if not rows or not due:
            return None
        found = Evaluated()
        for mode, purpose in enumerate((GREEDY, SAMPLED)):
            await self._draw(version, purpose, mode, range(facts.shard, rows, facts.shards), found)
        return found

    async def _draw(
        self, version: int, purpose: str, mode: int, rows: range, found: Evaluated
    ) -> None:
        facts = self._context.facts
        # Ordinals below zero: no record of an evaluation can be taken for one of the run.
        leases = [Lease(-(2 * row + 1 + mode), row, 0, (0,)) for row in rows]
        ledger = Ledger(
            shard=facts.shard, shards=facts.shards, rows=len(rows), seed=facts.run.seed, samples=1
        )
        ledger.adopt(leases)
        await self._rollout.draw(ledger, version, mode, purpose, leases)
        sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

        def add(name: str, value: float) -> None:
            total, weight = sums[f"{purpose}/{name}"]
            sums[f"{purpose}/{name}"] = total + value, weight + 1

        for (header,) in ledger.complete():
            add("length", header.n_actions)
            for name, value in header.rewards.items():
                add(name, value)
            if header.row < facts.evaluation.show:
                found.samples.append(header)
        found.sums.update(sums)
