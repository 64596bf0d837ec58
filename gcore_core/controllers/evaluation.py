"""Evaluates weights on held-out prompts.

Records are drawn greedily and at the training temperature, and scored by the same rewards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from gcore_core.contract.records import FAILED, Header, Lease
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.generation import Drawing, Round
from gcore_core.controllers.generation.ledger import Ledger, has_failed_reward
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.runtime.messages import GREEDY, SAMPLED
from gcore_core.runtime.worker_settings import JobFacts

LENGTH = "length"
#: What a reward is called here that has the name of the answers' length; no reward's has a dot.
_REWARD_LENGTH = "reward.length"
Sums = dict[str, tuple[float, float]]  # name -> (sum, weight); the mean is their quotient


@dataclass
class Evaluated:
    """Holds one shard's part of an evaluation.

    sums: of what was evaluated, such as ``greedy/length`` and ``sampled/REWARD``.
    samples: a few records to show, by reference.
    failed: way of drawing -> records that failed, or that a reward failed on; none where there is
        none.
    """

    sums: Sums = field(default_factory=dict)
    samples: list[Header] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


class Evaluates(Protocol):
    """Evaluates weights in a step program; all shards call it."""

    async def at(self, version: int, last: bool) -> Evaluated | None:
        """Evaluates weights ``version`` if it is due; returns None if it is not.

        last: whether the run ends with these weights.
        """


def is_due(facts: JobFacts, version: int, last: bool) -> bool:
    """Whether an evaluation is due: there are rows for it, and it is its time.

    It is before the first step, after the last one and every ``evaluation.every`` steps. A run that
    goes on from a checkpoint repeats none, and makes up for one that was missed.
    """
    if not facts.rows.get("evaluation", 0):
        return False
    if last:
        return True
    if version == facts.start_step and facts.evaluated:
        return False
    every = facts.evaluation.every
    return version in (0, facts.run.steps) or bool(every and not version % every)


class RewardEvaluation:
    """Evaluates a version of the weights, on this shard's part of the rows.

    A program that generates ahead of training evaluates while generators hold that version: before
    the next push.
    """

    def __init__(self, context: ControllerContext, placement: PlacementShard) -> None:
        self._context = context
        self._drawing = Drawing(context, placement)

    async def at(self, version: int, last: bool) -> Evaluated | None:
        """Evaluates weights ``version`` if an evaluation is due; returns None if it is not.

        When one is due: ``is_due``.
        """
        facts = self._context.facts
        if not is_due(facts, version, last):
            return None
        rows = min(facts.evaluation.prompts, facts.rows["evaluation"])
        own_rows = range(facts.shard, rows, facts.shards)
        evaluated = Evaluated()
        for mode, purpose in enumerate((GREEDY, SAMPLED)):
            round_ = Round(step=version, number=mode, purpose=purpose, least=version)
            await self._draw(round_, own_rows, evaluated)
        return evaluated

    async def _draw(self, round_: Round, rows: range, evaluated: Evaluated) -> None:
        """Has one record of each row drawn and scored, and adds them to ``evaluated``."""
        facts = self._context.facts
        # Ordinals below zero: no record of an evaluation can be taken for one of the run. Row 0 has
        # -1 in the greedy round and -2 in the sampled one, row 1 has -3 and -4, and so on.
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
            if header.status == FAILED or has_failed_reward(header):
                evaluated.failed[round_.purpose] += 1
            if header.status != FAILED:
                add(LENGTH, header.n_actions)
            for name, value in header.rewards.items():
                add(_REWARD_LENGTH if name == LENGTH else name, value)
            if header.row < facts.evaluation.show:
                evaluated.samples.append(header)
        evaluated.sums.update(sums)
