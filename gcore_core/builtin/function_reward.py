"""Scores records by a function of the user.

A reward that fails is a status of its record, never a number.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gcore_core.builtin.config import FunctionRewardConfig
from gcore_core.config.user_functions import line_in, load_function
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure

T = TypeVar("T")
#: What a function of the user may raise. Code that calls ``exit`` is no reason to end the worker.
_RAISED = (Exception, SystemExit)


class FunctionScorer:
    """Scores records by a function in a Python file.

    An async function of one record is called for all records concurrently. Its event loop runs in
    the thread that calls, and stays between calls, so that clients that the function opens can be
    used again.
    """

    def __init__(self, config: FunctionRewardConfig, context: WorkerContext) -> None:
        self._file = Path(config.path)
        self._function = load_function(self._file, config.name)
        self._name = config.name
        self._batch = config.batch
        self._async = _is_async(self._function)
        self._runner: asyncio.Runner | None = None

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Returns one score for each record.

        When the function raises, its record gets a failure. In the batch form, all records do.
        """
        if self._batch:
            return self._score_batch(list(records))
        if self._async:
            return self._wait(self._score_concurrently(records))
        return [self._score_one(record) for record in records]

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _score_one(self, record: ScoredRecord) -> Score:
        try:
            return self._checked(self._function(record))
        except _RAISED as error:
            return self._failed(error)

    async def _score_concurrently(self, records: Sequence[ScoredRecord]) -> list[Score]:
        async def value(record: ScoredRecord) -> Any:
            return await _returned(self._function(record))

        # With return_exceptions, a CancelledError from one call does not cancel the others either.
        results = await asyncio.gather(*map(value, records), return_exceptions=True)
        return [
            self._failed(r) if isinstance(r, BaseException) else self._checked(r) for r in results
        ]

    def _score_batch(self, records: list[ScoredRecord]) -> list[Score]:
        """Calls a function of many records once; what it gives is an array, a list or a tuple."""
        try:
            result = self._function(records)
            values = self._wait(_returned(result)) if inspect.iscoroutine(result) else result
        except _RAISED as error:
            return [self._failed(error)] * len(records)
        if isinstance(values, SystemExit):
            return [self._failed(values)] * len(records)
        values = values.tolist() if isinstance(values, np.ndarray) else values
        if not isinstance(values, list | tuple):
            return [failure(f"{self._name} returned {type(values).__name__}, not a list")] * len(
                records
            )
        if len(values) != len(records):
            return [
                failure(f"{self._name} returned {len(values)} values for {len(records)} records")
            ] * len(records)
        return [self._checked(value) for value in values]

    def _checked(self, value: Any) -> Score:
        """Returns the value as a score, or a failure when it is no finite number."""
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that it was never awaited
        if not isinstance(value, numbers.Real | np.bool_):
            return failure(f"{self._name} returned {type(value).__name__}, not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return (
            Score(value=number)
            if math.isfinite(number)
            else failure(f"{self._name} returned {number}")
        )

    def _failed(self, error: BaseException) -> Score:
        """Returns a failure that names the error and the line in the user's file."""
        line = line_in(self._file, error)
        place = f" ({self._file.name}:{line})" if line else ""
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return failure(message[:REASON_CHARACTERS] + place)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs async work to its end."""
        self._runner = self._runner or asyncio.Runner()
        try:
            return self._runner.run(work)
        except BaseException:  # such as a handler's of a signal, while the loop waited
            self.close()  # what it was about to do must not go on in the next call
            raise


async def _returned(work: Awaitable[Any]) -> Any:
    """Returns what a call gives, and a SystemExit as a value.

    Out of a task it would end the event loop, and so the calls for the other records.
    """
    try:
        return await work
    except SystemExit as error:
        return error


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
