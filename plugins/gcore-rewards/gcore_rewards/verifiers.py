"""Verifies completions: 1 where a completion has its row's answer, else 0.

A record whose row has no answer is a failure, not a 0. A row whose answer cannot be compared ends
the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards.config import VerifierConfig
from gcore_rewards.patterns import Pattern, SlowPattern, timed_out
from gcore_rewards.plain_numbers import PlainNumber, last_number, number_of

#: Of an answer that an error shows.
_SHOWN_CHARACTERS = 60


class ExactMatch:
    """Scores 1 when the completion is the row's answer, both stripped of white space; else 0."""

    def __init__(self, config: VerifierConfig, context: WorkerContext) -> None:
        self._config = config
        self._pattern = Pattern(config.pattern, config.pattern_s)

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return [self._score(record) for record in records]

    def _score(self, record: ScoredRecord) -> Score:
        answer = record.prompt.fields.get(self._config.answer)
        if answer is None:
            return no_answer(record, self._config.answer)
        try:
            text = self._pattern.part(record.text)
        except SlowPattern as error:
            return timed_out(error)
        return Score(
            value=float(text is not None and self._normal(text) == self._normal(str(answer)))
        )

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self._config.ignore_case else text.strip()


class Numeric:
    """Scores 1 when the number that a completion ends with is the row's answer, else 0.

    Two numbers are the same when they differ at most by the tolerance. A completion that ends with
    anything but one plain number scores 0; see ``plain_numbers`` for what is one.
    """

    def __init__(self, config: VerifierConfig, context: WorkerContext) -> None:
        self._answer = config.answer
        self._tolerance = Fraction(Decimal(str(config.tolerance)))
        self._pattern = Pattern(config.pattern, config.pattern_s)

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Raises DataError for a row whose answer is not one plain number."""
        return [self._score(record) for record in records]

    def _score(self, record: ScoredRecord) -> Score:
        answer = record.prompt.fields.get(self._answer)
        if answer is None:
            return no_answer(record, self._answer)
        expected = number_of(str(answer))
        if expected is None:
            raise DataError(
                f"field {self._answer!r} is not one plain number: {shortened(answer)}",
                where=f"row {record.prompt.row} of the dataset",
                why="rewards/numeric compares numbers such as 42, -1.5, 7/2, 30% or 1,234",
                todo="correct or drop the row, or compare with rewards/math (expressions) or "
                "rewards/exact-match (text)",
            )
        try:
            completion = self._pattern.part(record.text)
        except SlowPattern as error:
            return timed_out(error)
        return Score(value=float(self._is_right(completion or "", expected)))

    def _is_right(self, completion: str, expected: PlainNumber) -> bool:
        number = last_number(completion)
        return number is not None and number.is_near(expected, self._tolerance)


def no_answer(record: ScoredRecord, field: str) -> Score:
    """The failure of a record whose row lacks the field with the answer."""
    has = ", ".join(record.prompt.fields) or "none"
    return failure(
        f"row {record.prompt.row} has no field {field!r}; it has: {has}"[:REASON_CHARACTERS]
    )


def shortened(answer: object) -> str:
    """A row's answer, as errors show it."""
    text = str(answer).strip()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
