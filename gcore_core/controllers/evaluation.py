"""Evaluates weights on held-out prompts.

Records are drawn greedily and at the training temperature, and scored by the same rewards.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gcore_core.contract.records import Header, Lease
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.window import Drawing, Round
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.runtime.messages import GREEDY, SAMPLED

Sums = dict[str, tuple[float, float]]  # name -> (sum, weight); the mean is their quotient


@dataclass
class Evaluated:
    """Holds one shard's part of an evaluation.

    sums: of rewards and lengths, by purpose and name.
    samples: a few records to show, by reference.
    """

    sums: Sums = field(default_factory=dict)
    samples: list[Header] = field(default_factory=list)


class Evaluation:
    """Evaluates a version of the weights, on this shard's part of the rows.

    A program that generates ahead of training evaluates while generators hold that version: before
    the next push.
    """

    def __init__(self, context: ControllerContext, placement: PlacementShard) -> None:
        self._context = context
        self._drawing = Drawing(context, placement)

    async def at(self, version: int, last: bool) -> Evaluated | None:
        """Evaluates weights ``version`` if an evaluation is due; returns None if it is not.

        One is due before the first step, after the last one (``last``) and every so many steps. A
        run that goes on from a checkpoint repeats none, and makes up for one that was missed.
        """
        facts = self._context.facts
        rows = min(facts.evaluation.prompts, facts.rows.get("evaluation", 0))
        if not rows or not (last or self._is_due(version)):
            return None
        own_rows = range(facts.shard, rows, facts.shards)
        evaluated = Evaluated()
        for mode, purpose in enumerate((GREEDY, SAMPLED)):
            round_ = Round(step=version, number=mode, purpose=purpose, least=version)
            await self._draw(round_, own_rows, evaluated)
        return evaluated

    def _is_due(self, version: int) -> bool:
        facts = self._context.facts
        if version == facts.start_step and facts.evaluated:
            return False
        every = facts.evaluation.every
        return version in (0, facts.run.steps) or bool(every and not version % every)

    async def _draw(self, round_: Round, rows: range, evaluated: Evaluated) -> None:
        facts = self._context.facts
        # Ordinals below zero: no record of an evaluation can be taken for one of the run.
        leases = [Lease(-(2 * row + 1 + round_.number), row, 0, (0,)) for row in rows]
        ledger = Ledger(
            shard=facts.shard, shards=facts.shards, rows=len(rows), seed=facts.run.seed, samples=1
        )
        ledger.adopt(leases)
        await self._drawing.draw(ledger, round_, leases)
        sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

        def add(name: str, value: float) -> None:
            total, weight = sums[f"{round_.purpose}/{name}"]
            sums[f"{round_.purpose}/{name}"] = total + value, weight + 1

        for (header,) in ledger.complete():
            add("length", header.n_actions)
            for name, value in header.rewards.items():
                add(name, value)
            if header.row < facts.evaluation.show:
                evaluated.samples.append(header)
        evaluated.sums.update(sums)
