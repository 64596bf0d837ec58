"""Provides ``sim/judge``: rewards by chance, after the time that generative judges would take."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_placement.sim.clock import spend
from gcore_placement.sim.config import JudgeConfig
from gcore_placement.sim.prompts import AnswerLengths


class SimJudge:
    """Scores records by chance.

    Reward and length of a verdict depend on (seed, ordinal, sample) and the row alone, so scoring a
    record again gives the same.
    """

    def __init__(self, config: JudgeConfig, context: WorkerContext) -> None:
        self._config = config
        self._progress = context.progress
        self._verdicts = AnswerLengths(
            config.verdict_median, config.verdict_sigma, config.verdict_limit
        )

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """See ``Scorer.score``. Raises DataError when ``reads`` is set and a medium's hash is
        wrong.
        """
        seconds = sum(self.seconds(record) for record in records)
        spend(seconds * self._config.time_scale, self._progress)
        for record in records if self._config.reads else ():
            for name, array in record.media.items():
                if xxhash.xxh3_64_intdigest(array.data) != record.refs[name].digest:
                    raise DataError(
                        f"{name!r} is not what was stored", where=f"ordinal {record.ordinal}"
                    )
        return [Score(value=self._value(record)) for record in records]

    def seconds(self, record: ScoredRecord) -> float:
        """Returns a record's share of the judges' time.

        Its tokens are read once, and its verdict is one of ``running`` that are written together.
        """
        config = self._config
        profile = self._config.profile
        read_tokens = (
            config.instructions
            + record.columns["prompt_ids"].size
            + record.columns["action_ids"].size
        )
        verdict_tokens = min(
            self._verdicts.draw(self._chance_of("verdict", record, 2**64)), config.verdict_limit
        )
        cached = config.running * (read_tokens + verdict_tokens / 2)
        step_s = profile.step_s(config.running, cached)
        return (
            profile.prefill_s * read_tokens + verdict_tokens * step_s / config.running
        ) / config.replicas

    def _value(self, record: ScoredRecord) -> float:
        """Returns the reward of a record, 0 or 1."""
        # The row decides whether all of its answers get the same reward; then the group does not
        # teach. Otherwise each answer gets its own.
        group = (
            xxhash.xxh3_64_intdigest(f"{self._config.seed}/{record.prompt.row}".encode()) / 2**64
        )
        if group < self._config.decided:
            return float(group < self._config.decided * self._config.solved)
        return float(self._chance_of("reward", record, 2**32) / 2**32 < self._config.solved)

    def _chance_of(self, purpose: str, record: ScoredRecord, below: int) -> int:
        """Returns a whole number from 0 to ``below`` - 1 that depends on the record alone.

        purpose: what it is for; numbers for different purposes do not depend on each other.
        """
        name = f"{purpose}/{self._config.seed}/{record.ordinal}/{record.sample}"
        return xxhash.xxh3_64_intdigest(name.encode()) % below
