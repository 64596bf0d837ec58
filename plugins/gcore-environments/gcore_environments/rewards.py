"""Scores records by what their environment gave."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import Score, ScoredRecord, failure
from gcore_environments.settings import EnvironmentRewardConfig


class EnvironmentReward:
    """Reads the rewards of an episode from its record.

    A name that the environment did not give counts as 0: it gives rewards when there is something
    to say.
    """

    def __init__(self, config: EnvironmentRewardConfig, context: WorkerContext) -> None:
        self._name = config.name

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Returns the named reward of each record, or the sum of all."""
        return [self._score(record) for record in records]

    def _score(self, record: ScoredRecord) -> Score:
        if "episode" not in record.columns:
            return failure("the record is no episode: the job has no section environment")
        rewards = json.loads(record.columns["episode"].tobytes())["rewards"]
        if self._name:
            return Score(value=float(rewards.get(self._name, 0.0)))
        return Score(value=float(sum(rewards.values())))
