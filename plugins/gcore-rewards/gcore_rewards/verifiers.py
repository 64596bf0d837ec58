"""Verifies completions: 1 where a completion has its row's answer, else 0.

A record whose row has no answer is a failure, not a 0. So is one whose answer no text can be. A row
whose answer is no number ends the run. ``read_answer`` says it of a row before there is any
completion.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.rows import same_value
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards.answers import last_number
from gcore_rewards.config import VerifierConfig
from gcore_rewards.numbers import MOST_DIGITS, Number, number_of, plain_characters
from gcore_rewards.patterns import Pattern, SlowPattern, timed_out

#: Of an answer that an error shows.
_SHOWN_CHARACTERS = 60


class ExactMatch:
    """Scores 1 when the completion is the row's answer, both stripped of white space; else 0.

    Two spellings of one text that look the same are the same: see ``one_spelling``.

    An answer that is no text is compared as JSON says it: 3.0 is "3" and "3.0", true is "true".
    """

    def __init__(self, config: VerifierConfig, context: WorkerContext) -> None:
        self._config = config
        self._pattern = Pattern(config.pattern, config.pattern_s)

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return [self._score(record) for record in records]

    def read_answer(self, prompt: Prompt) -> str | bool | int | float:
        """Returns what completions are compared with. Raises DataError where there is none."""
        answer = answer_of(prompt, self._config.answer)
        if isinstance(answer, str):
            return self._normal(answer)
        if not isinstance(answer, bool | int | float) or not math.isfinite(answer):
            raise unreadable(
                prompt,
                self._config.answer,
                "is neither a text nor a number nor true or false",
                why="rewards/exact-match compares it with the text of a completion",
                todo="correct or drop the row, or take another reward",
            )
        return answer

    def _score(self, record: ScoredRecord) -> Score:
        if self._config.answer not in record.prompt.fields:
            return no_answer(record, self._config.answer)
        try:
            answer = self.read_answer(record.prompt)
        except DataError as error:
            return failure(f"row {record.prompt.row}: {error.what}"[:REASON_CHARACTERS])
        try:
            text = self._pattern.part(record.text)
        except SlowPattern as error:
            return timed_out(error)
        return Score(value=float(text is not None and same_value(answer, self._normal(text))))

    def _normal(self, text: str) -> str:
        text = one_spelling(text).strip()
        return text.casefold() if self._config.ignore_case else text


class Numeric:
    """Scores 1 when the number that a completion ends with is the row's answer, else 0.

    Two numbers are the same when they differ at most by the tolerance. A completion that ends with
    anything but one plain number scores 0; see ``gcore_rewards.numbers`` for what is one.
    """

    def __init__(self, config: VerifierConfig, context: WorkerContext) -> None:
        self._answer = config.answer
        self._tolerance = Fraction(Decimal(str(config.tolerance)))
        self._pattern = Pattern(config.pattern, config.pattern_s)

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Raises DataError for a row whose answer is not one plain number."""
        return [self._score(record) for record in records]

    def read_answer(self, prompt: Prompt) -> Number:
        """Returns the row's number. Raises DataError where there is none."""
        number = number_of(answer_of(prompt, self._answer))
        if number is None:
            raise unreadable(
                prompt,
                self._answer,
                "is not one plain number",
                why="rewards/numeric compares numbers such as 42, -1.5, 7/2, 30% or 1,234",
                todo="correct or drop the row, or compare with rewards/math (expressions) or "
                "rewards/exact-match (text)",
            )
        return number

    def _score(self, record: ScoredRecord) -> Score:
        if self._answer not in record.prompt.fields:
            return no_answer(record, self._answer)
        expected = self.read_answer(record.prompt)
        try:
            completion = self._pattern.part(record.text)
        except SlowPattern as error:
            return timed_out(error)
        number = last_number(completion or "")
        return Score(value=float(number is not None and number.is_near(expected, self._tolerance)))


def one_spelling(text: str) -> str:
    """Returns a text with one spelling for what readers cannot tell apart.

    A letter with its accents is one character, letters of full or half width are those of the usual
    width, and lines end with a line feed. There is one minus, one space, one slash and one percent
    sign, and nothing without width. What looks different stays: x², and A next to a.
    """
    if text.isascii():
        return text.replace("\r\n", "\n").replace("\r", "\n")
    usual = "".join(
        unicodedata.normalize("NFKC", letter)
        if unicodedata.east_asian_width(letter) in ("F", "H")
        else letter
        for letter in text
    )
    plain = plain_characters(unicodedata.normalize("NFC", usual))
    return plain.replace("\r\n", "\n").replace("\r", "\n")


def answer_of(prompt: Prompt, field: str) -> Any:
    """Returns a row's answer as it is. Raises DataError for a row without the field."""
    if field not in prompt.fields:
        raise DataError(
            f"no field {field!r}",
            where=f"row {prompt.row} of the dataset",
            why=f"it has: {', '.join(prompt.fields) or 'none'}",
            todo="set the reward's config.answer to the field with the right answer",
        )
    return prompt.fields[field]


def no_answer(record: ScoredRecord, field: str) -> Score:
    """Makes the failure of a record whose row lacks the field with the answer."""
    has = ", ".join(record.prompt.fields) or "none"
    return failure(
        f"row {record.prompt.row} has no field {field!r}; it has: {has}"[:REASON_CHARACTERS]
    )


def unreadable(prompt: Prompt, field: str, what: str, *, why: str, todo: str) -> DataError:
    """Makes the error for a row whose answer cannot be compared.

    what: what the field is, behind its name.
    """
    return DataError(
        f"field {field!r} {what}: {shortened(prompt.fields[field])}",
        where=f"row {prompt.row} of the dataset",
        why=why,
        todo=todo,
    )


def shortened(answer: object) -> str:
    """Returns a row's answer, as errors show it."""
    if isinstance(answer, int) and abs(answer) >= 10**MOST_DIGITS:
        return f"an integer of more than {MOST_DIGITS} digits"  # Python does not print all of them
    text = str(answer).strip()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
