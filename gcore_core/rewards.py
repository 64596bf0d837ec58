"""Rewards that the core brings: a user's function, and two verifiers. A failed reward is a status, never a number."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.data_config import FunctionRewardConfig, VerifierConfig
from gcore_core.protocols import Score, ScoredRecord, WorkerContext
from gcore_core.records import REWARD_FAILED
from gcore_core.user_functions import line_in, load_function

_REASON_CHARACTERS = 200
#: a number as people write it: 1,234.5 or -.5 or 2e3; a minus after a digit, a letter or a bracket is an operator
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?")


class FunctionScorer:
    """A function in a Python file. Async functions of one record run concurrently, on an event loop of their own."""

    def __init__(self, config: FunctionRewardConfig, context: WorkerContext) -> None:
        self._file = Path(config.path)
        self._function = load_function(self._file, config.name)
        self._name = config.name
        self._batch = config.batch
        self._async = _is_async(self._function)
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """One score per record. Where the function raises, its record (all, in the batch form) is failed."""
        if self._batch:
            return self._score_batch(list(records))
        if self._async:
            scores: list[Score] = self._wait(self._score_concurrently(records))
            return scores
        return [self._score_one(record) for record in records]

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _score_one(self, record: ScoredRecord) -> Score:
        try:
            return self._checked(self._function(record))
        except Exception as error:
            return self._failed(error)

    async def _score_concurrently(self, records: Sequence[ScoredRecord]) -> list[Score]:
        async def value(record: ScoredRecord) -> Any:
            return await self._function(record)

        # return_exceptions also keeps a CancelledError that the function lets out from cancelling the others
        results = await asyncio.gather(*map(value, records), return_exceptions=True)
        return [self._failed(r) if isinstance(r, BaseException) else self._checked(r) for r in results]

    def _score_batch(self, records: list[ScoredRecord]) -> list[Score]:
        try:
            result = self._function(records)
            values = self._wait(result) if inspect.iscoroutine(result) else result
        except Exception as error:
            return [self._failed(error)] * len(records)
        values = values.tolist() if isinstance(values, np.ndarray) else values
        if not isinstance(values, list | tuple):
            return [_failure(f"{self._name} returned {type(values).__name__}, not a list")] * len(records)
        if len(values) != len(records):
            return [_failure(f"{self._name} returned {len(values)} values for {len(records)} records")] * len(records)
        return [self._checked(value) for value in values]

    def _checked(self, value: Any) -> Score:
        if inspect.iscoroutine(value):
            value.close()
        if not isinstance(value, numbers.Real | np.bool_):
            return _failure(f"{self._name} returned {type(value).__name__}, not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return Score(value=number) if math.isfinite(number) else _failure(f"{self._name} returned {number}")

    def _failed(self, error: BaseException) -> Score:
        line = line_in(self._file, error)
        place = f" ({self._file.name}:{line})" if line else ""
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _failure(message[:_REASON_CHARACTERS] + place)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs on a thread of its own: the caller may itself be inside an event loop, and clients outlive a call."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=f"reward {self._name}", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class ExactMatch:
    """1 when the completion, stripped, is the row's answer; else 0."""

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
        return Score(value=float(text is not None and self._normal(text) == self._normal(str(answer))))

    def _normal(self, text: str) -> str:
        return text.strip().casefold() if self._config.ignore_case else text.strip()


class Numeric:
    """1 when the last number of the completion is that of the row's answer, up to the tolerance; else 0."""

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
            return _failure(f"field {self._answer!r} of row {record.prompt.row} holds no number: {str(answer)[:40]}")
        found = _last_number(_extracted(record.text, self._pattern) or "")
        return Score(value=float(found is not None and self._equal(found, expected)))

    def _equal(self, a: Decimal, b: Decimal) -> bool:
        try:
            return abs(a - b) <= self._tolerance
        except ArithmeticError:  # too far apart for decimal
            return False


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _failure(reason: str) -> Score:
    return Score(value=None, status=REWARD_FAILED, reason=reason)


def _no_answer(record: ScoredRecord, field: str) -> Score:
    has = ", ".join(record.prompt.fields) or "none"
    return _failure(f"row {record.prompt.row} has no field {field!r}; it has: {has}"[:_REASON_CHARACTERS])


def _extracted(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """The text, or what the last match of the pattern holds; None where nothing matches."""
    if pattern is None:
        return text
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    return matches[-1].group(1 if pattern.groups else 0)


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:  # an exponent beyond what decimal can hold
        return None
