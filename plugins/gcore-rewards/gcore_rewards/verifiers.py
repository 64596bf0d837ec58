"""Verifies completions: 1 where a completion has its row's answer, else 0.

A row without an answer is a failure, not a 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards.config import VerifierConfig

#: a number as people write it: 1,234.5 or -.5 or 2e3; a minus after a digit, a letter or a bracket
#: is an operator
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
)


class ExactMatch:
    """Scores 1 when the completion is the row's answer, both stripped of white space; else 0."""

    def __init__(self, config: VerifierConfig, context: WorkerContext) -> None:
        self._config = config
        self._pattern = re.compile(config.pattern) if config.pattern else None

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return [self._score(record) for record in records]

    def _score(self, record: ScoredRecord) -> Score:
        answer = record.prompt.fields.get(self._config.answer)
        if answer is None:
            return _no_answer(record, self._config.answer)
        text = _extracted(record.text, self._pattern)
        return Score(
            value=float(text is not None and self._normal(text) == self._normal(str(answer)))
        )

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self._config.ignore_case else text.strip()


class Numeric:
    """Scores 1 when the last numbers of completion and answer differ at most by the tolerance.

    Otherwise it scores 0. An answer without a number is a failure.
    """

    def __init__(self, config: VerifierConfig, context: WorkerContext) -> None:
        self._answer = config.answer
        self._tolerance = Decimal(str(config.tolerance))
        self._pattern = re.compile(config.pattern) if config.pattern else None

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return [self._score(record) for record in records]

    def _score(self, record: ScoredRecord) -> Score:
        answer = record.prompt.fields.get(self._answer)
        if answer is None:
            return _no_answer(record, self._answer)
        expected = _last_number(str(answer))
        if expected is None:
            return failure(
                f"field {self._answer!r} of row {record.prompt.row} holds no number: "
                f"{str(answer)[:40]}"
            )
        found = _last_number(_extracted(record.text, self._pattern) or "")
        return Score(value=float(found is not None and self._equal(found, expected)))

    def _equal(self, a: Decimal, b: Decimal) -> bool:
        try:
            return abs(a - b) <= self._tolerance
        except ArithmeticError:  # too far apart for decimal
            return False


def _no_answer(record: ScoredRecord, field: str) -> Score:
    has = ", ".join(record.prompt.fields) or "none"
    return failure(
        f"row {record.prompt.row} has no field {field!r}; it has: {has}"[:REASON_CHARACTERS]
    )


def _extracted(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """Returns the text, or what the pattern's last match holds; None where nothing matches.

    The match's first group counts where the pattern has groups.
    """
    if pattern is None:
        return text
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    return matches[-1].group(1 if pattern.groups else 0)


def _last_number(text: str) -> Decimal | None:
    """Returns the last number in a text; None where it has none that Decimal can hold."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:  # an exponent beyond what decimal can hold
        return None
