"""Step programs whose records are read: prepare, train, save. Nothing is sampled, rewarded, pushed.

A row is a group, its answers are the group's records. Order, ledger, balance, checkpoints and
reports are those of every step program, so a row trains once in each epoch, whatever fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from gcore_algorithms.offline.config import OfflineConfig
from gcore_core.contract.algorithms import GroupScalars
from gcore_core.kits.programs import (
    ControllerContext,
    Evaluates,
    LossEvaluation,
    StepProgram,
    Stopwatch,
)


class Alike:
    """An advantage that is 1 for every record: what an answer is worth, the objective knows.

    group_size: answers of a row.
    """

    requires: frozenset[str] = frozenset()

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        return np.zeros(0)

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        return [np.ones(len(group.lengths)) for group in groups]


class OfflineProgram(StepProgram):
    """One shard.

    answers: of a row, each a record.
    """

    pushes: ClassVar[bool] = False
    answers: ClassVar[int]

    def __init__(self, config: OfflineConfig, context: ControllerContext) -> None:
        super().__init__(config, replace(context, chosen_advantage=Alike(self.answers)))

    def make_evaluation(self) -> Evaluates:
        return LossEvaluation(self.context, self.placement, self.answers)

    async def step(self, step: int) -> bool:
        """Takes a step's rows and trains on them; whether it was the last one."""
        watch = Stopwatch(self.context.trace, step)
        taken = await self.take(step)
        watch.lap("rollout")
        trained = await self.train(step, taken, watch)
        return await self.end(step, taken, trained, watch)


class SftProgram(OfflineProgram):
    """A row has one answer."""

    answers = 1


class PairsProgram(OfflineProgram):
    """A row has two answers: record 0 is the chosen one, record 1 the rejected one."""

    answers = 2


class ScoresProgram(OfflineProgram):
    """A row has one answer, with a score."""

    answers = 1
