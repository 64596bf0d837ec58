"""Scores records by what their environment gave."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import did_you_mean
from gcore_core.contract.scorer import Score, ScoredRecord, failure
from gcore_environments.settings import EnvironmentRewardConfig
from gcore_environments.stored import EVALUATION, FOLDER, line_of

log = logging.getLogger(__name__)

#: After so many episodes without the reward of a name, the log says which names there were.
EPISODES = 32


class EnvironmentReward:
    """Reads the rewards of an episode from its record.

    A name that the environment did not give counts as 0: it gives rewards when there is something
    to say. Where it never gave it, the log says so once.
    """

    def __init__(self, config: EnvironmentRewardConfig, context: WorkerContext) -> None:
        self._name = config.name
        self._keep = config.keep
        self._folder = Path(context.directory) / FOLDER
        self._file = f"{context.role}-{context.rank}.jsonl"
        self._others: set[str] = set()  # names that episodes gave
        self._without = 0  # episodes in a row, from the first on; -1: one has given the name

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Returns the named reward of each record, or the sum of all."""
        if self._keep:
            episodes = [record for record in records if "episode" in record.columns]
            self._write(self._folder, [one for one in episodes if one.ordinal >= 0])
            evaluated = [one for one in episodes if one.ordinal < 0]
            self._write(self._folder / EVALUATION, evaluated)
        return [self._score(record) for record in records]

    def _write(self, folder: Path, episodes: Sequence[ScoredRecord]) -> None:
        if episodes:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / self._file).open("a", encoding="utf-8") as file:
                file.write("".join(map(line_of, episodes)))

    def _score(self, record: ScoredRecord) -> Score:
        if "episode" not in record.columns:
            return failure("the record is no episode: the job has no section environment")
        rewards = json.loads(record.columns["episode"].tobytes())["rewards"]
        if self._name:
            self._look(rewards)
            return Score(value=float(rewards.get(self._name, 0.0)))
        return Score(value=float(sum(rewards.values())))

    def _look(self, rewards: Mapping[str, float]) -> None:
        """Counts episodes until one has given the reward."""
        if self._name in rewards:
            self._without = -1
        if self._without < 0:
            return
        self._without += 1
        self._others |= rewards.keys()
        if self._without == EPISODES:
            log.warning(
                "no episode of the first %d gave a reward of the name %r%s; they gave: %s",
                EPISODES,
                self._name,
                did_you_mean(self._name, sorted(self._others)),
                ", ".join(sorted(self._others)) or "none",
            )
