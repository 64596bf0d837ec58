"""Provides ``sim/asks``, which asks an emulated judge one question about each record.

A group whose row teaches gets unequal rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError
from gcore_core.contract.order import sample_seed
from gcore_core.contract.questions import Question
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_placement.sim.config import AsksConfig

#: Lengths of verdicts on rows that do not say them.
_VERDICT = {
    "answer_median": 600.0,
    "answer_sigma": 0.5,
    "answer_limit": 4096,
}


class SimAsks:
    """Rewards every second sample of a group that teaches with 1, and all others with 0."""

    def __init__(self, config: AsksConfig, context: WorkerContext) -> None:
        if context.sampler is None:
            raise ContractError(
                "this reward asks a model, but names no role",
                where="rewards",
                todo="set rewards.<name>.role",
            )
        self._config = config
        self._sampler = context.sampler

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Asks one question about each record, waits for the verdicts and returns the rewards."""
        await self._sampler.sample([self.question(record) for record in records])
        return [
            Score(value=float(record.sample % 2 and record.prompt.fields.get("teaches", True)))
            for record in records
        ]

    def question(self, record: ScoredRecord) -> Question:
        """Returns the question about a record.

        The verdict is as long as the row and (seed, ordinal, sample) say.
        """
        record_tokens = record.columns["prompt_ids"].size + record.columns["action_ids"].size
        row_fields = record.prompt.fields
        verdict = {
            name: row_fields.get(name.replace("answer", "verdict"), value)
            for name, value in _VERDICT.items()
        }
        return Question(
            prompt=Prompt(
                row=0,
                text="judge",
                fields={"prompt_tokens": self._config.instructions + record_tokens, **verdict},
            ),
            seed=sample_seed(self._config.seed, record.ordinal, 0, record.sample),
            about=(record.ordinal, record.sample),
        )
