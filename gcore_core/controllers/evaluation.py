"""Evaluates weights on held-out rows: by the run's rewards, or by the loss of its objective.

For rewards, records are sampled greedily and at the training temperature, and scored by the
run's rewards. For the loss nothing is sampled and nothing is rewarded: the rows of
``evaluation.data`` come from the generators like the run's own, and the trainer computes loss
and metrics of the objective on them, without an update.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from gcore_core.contract.records import FAILED, Assignment, Header, Lease
from gcore_core.controllers.annotating import annotate, annotated
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.generation import Round, draw
from gcore_core.controllers.generation.ledger import Ledger, has_failed_reward
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.training import Plan, train_item
from gcore_core.runtime.messages import EVALUATE_RANKS, GREEDY, SAMPLED, EvaluateRequest, TrainItem
from gcore_core.runtime.relay import ask_ranks
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
    failed: way of drawing -> records that failed, or that a reward failed on; empty where
        none failed.
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
    """Returns whether an evaluation is due: it has rows, and it is its time.

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
        self._placement = placement

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
            round_ = Round(version=version, number=mode, purpose=purpose)
            await self._draw(round_, own_rows, evaluated)
        return evaluated

    async def _draw(self, round_: Round, rows: range, evaluated: Evaluated) -> None:
        """Samples and scores one record of each row, and adds them to ``evaluated``."""
        facts = self._context.facts
        # Ordinals below zero: no record of an evaluation can be taken for one of the run. Row 0 has
        # -1 in the greedy round and -2 in the sampled one, row 1 has -3 and -4, and so on.
        leases = [Lease(-(2 * row + 1 + round_.number), row, 0, (0,)) for row in rows]
        ledger = Ledger(
            shard=facts.shard, shards=facts.shards, rows=len(rows), seed=facts.run.seed, samples=1
        )
        ledger.adopt(leases)
        await draw(self._context, self._placement, ledger, round_, leases)
        sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

        def add(name: str, value: float) -> None:
            total, weight = sums[f"{round_.purpose}/{name}"]
            sums[f"{round_.purpose}/{name}"] = total + value, weight + 1

        for (header,) in ledger.complete():
            if header.status == FAILED or has_failed_reward(header):
                evaluated.failed[round_.purpose] += 1
            if header.status != FAILED:
                add(LENGTH, header.n_sampled)
            for name, value in header.rewards.items():
                add(_REWARD_LENGTH if name == LENGTH else name, value)
            if header.row < facts.evaluation.show:
                evaluated.samples.append(header)
        evaluated.sums.update(sums)


#: What stands before names of an evaluation whose records were neither drawn greedily nor sampled.
GIVEN = "given"


class LossEvaluation:
    """Evaluates a version of the weights by the trainer's loss, on this shard's part of the rows.

    Groups that the generators cannot give, such as rows that are too long, are left out. What is
    left is reported as ``given/loss`` and ``given/NAME`` for each metric of the objective, with
    ``given/dropped``, the number of groups that were left out.

    samples: records of a group.
    """

    def __init__(self, context: ControllerContext, placement: PlacementShard, samples: int) -> None:
        self._context = context
        self._samples = samples
        self._placement = placement

    async def at(self, version: int, last: bool) -> Evaluated | None:
        """Evaluates weights ``version`` if it is due (``is_due``); returns None if it is not."""
        facts = self._context.facts
        if not is_due(facts, version, last):
            return None
        rows = min(facts.evaluation.prompts, facts.rows["evaluation"])
        groups = await self._draw(version, range(facts.shard, rows, facts.shards))
        whole = [group for group in groups if all(header.status != FAILED for header in group)]
        sums = await self._evaluate(version, whole)
        shown = [h for group in whole for h in group if h.row < facts.evaluation.show]
        dropped = float(len(groups) - len(whole))
        # Every rank has summed over all shards, so that only the lead reports it.
        own = sums if self._context.agree.lead else {}
        # A report divides sums by weights. These weights add up to 1, so it has the plain sum.
        every = {**own, "dropped": (dropped, 1.0 / facts.shards)}
        return Evaluated({f"{GIVEN}/{name}": pair for name, pair in every.items()}, shown)

    async def _draw(self, version: int, rows: range) -> list[list[Header]]:
        """Asks for the rows' records; they are held in memory for the step after ``version``."""
        facts = self._context.facts
        samples = tuple(range(self._samples))
        # Ordinals below zero: no record of an evaluation can be taken for one of the run.
        leases = [Lease(-(row + 1), row, 0, samples) for row in rows]
        ledger = Ledger(
            shard=facts.shard,
            shards=facts.shards,
            rows=len(rows),
            seed=facts.run.seed,
            samples=self._samples,
        )
        ledger.adopt(leases)
        round_ = Round(version=version, number=0, purpose=GREEDY)
        await draw(self._context, self._placement, ledger, round_, leases)
        return list(ledger.complete())

    async def _evaluate(
        self, version: int, groups: list[list[Header]]
    ) -> dict[str, tuple[float, float]]:
        """Asks the ranks for the objective on these groups; returns sums over all shards."""
        context = self._context
        ranks = len(context.ranks)
        plan: Plan = {
            header.key: Assignment(header.row % ranks, 0) for group in groups for header in group
        }
        unplaced = [train_item(header, plan) for group in groups for header in group]
        parts: list[list[TrainItem]] = [[] for _ in range(ranks)]
        extras = await annotate(context, version, unplaced, {}, GREEDY)
        for item in annotated(unplaced, extras):
            parts[plan[item.ordinal, item.sample].rank].append(item)
        # Nothing was rewarded, so every record has the same advantage.
        requests = [EvaluateRequest(version, part, [1.0] * len(part)) for part in parts]
        shard = context.facts.shard
        answers = await ask_ranks(shard, context.ranks, EVALUATE_RANKS, version, requests)
        return answers[0]
