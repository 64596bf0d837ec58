"""Evaluates weights by the objective on held-out rows: nothing is sampled and nothing is rewarded.

The rows of ``evaluation.data`` come from the generators as those of the run do. The trainer
computes loss and metrics of the job's objective on them, without an update.
"""

from __future__ import annotations

from gcore_core.contract.records import FAILED, Assignment, Header, Lease
from gcore_core.controllers.annotating import annotate, annotated
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.evaluation import Evaluated, is_due
from gcore_core.controllers.generation import Drawing, Round
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.relayed import ask_ranks
from gcore_core.controllers.training import Plan, train_item
from gcore_core.runtime.messages import EVALUATE_RANKS, GREEDY, EvaluateRequest, TrainItem

#: What stands before names of an evaluation whose records were neither drawn greedily nor sampled.
GIVEN = "given"


class LossEvaluation:
    """Evaluates a version of the weights by the trainer's loss, on this shard's part of the rows.

    Groups that the generators cannot give, such as rows that are too long, are left out. What is
    left is reported as ``given/loss`` and ``given/NAME`` for each metric of the objective, beside
    ``given/dropped``, the number of groups that were left out.

    samples: records of a group.
    """

    def __init__(self, context: ControllerContext, placement: PlacementShard, samples: int) -> None:
        self._context = context
        self._samples = samples
        self._drawing = Drawing(context, placement)

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
        """Has the rows' records made; they are held in memory for the step after ``version``."""
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
        round_ = Round(step=version, number=0, purpose=GREEDY, least=version)
        await self._drawing.draw(ledger, round_, leases)
        return list(ledger.complete())

    async def _evaluate(
        self, version: int, groups: list[list[Header]]
    ) -> dict[str, tuple[float, float]]:
        """Has the ranks compute the objective on these groups; returns sums over all shards."""
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
