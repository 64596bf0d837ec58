"""A circuit breaker: after enough failures in a row, a service that is down is left alone for a
while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CircuitOpen(Exception):
    """The service is left alone; the message says for how long."""


class Breaker:
    """Closed until ``failures`` calls have failed one after the other; then open for ``rest_s``;
    then one call tries.

    Its success closes the circuit; its failure opens it for as long again.
    """

    def __init__(
        self, failures: int, rest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit, self._rest_s, self._clock = failures, rest_s, clock
        self._failed = 0
        self._open_until = 0.0
        self._trying = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call: an exception, cancellation too, is a failure. Raises CircuitOpen before
        it begins.
        """
        trial = self._failed >= self._limit
        if trial:
            left_s = self._open_until - self._clock()
            if left_s > 0 or self._trying:
                raise CircuitOpen(
                    f"left alone after {self._failed} failures, for {max(0.0, left_s):.0f} s more"
                )
            self._trying = True
        try:
            yield
        except BaseException:
            self._failed += 1
            if self._failed >= self._limit:
                self._open_until = self._clock() + self._rest_s
            raise
        else:
            self._failed = 0
        finally:
            if trial:
                self._trying = False
