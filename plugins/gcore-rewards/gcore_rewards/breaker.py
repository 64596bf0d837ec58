"""Breaks the circuit to a service that is down: after failures in a row it rests for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CircuitOpen(Exception):
    """The service is left alone; the message says for how long."""


class Breaker:
    """Counts failures in a row and refuses calls while the circuit is open.

    The circuit is closed until ``failures`` calls have failed one after the other. Then it is open
    for ``rest_s`` seconds. After that one call is let through: its success closes the circuit, its
    failure opens it for as long again.
    """

    def __init__(
        self, failures: int, rest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = failures
        self._rest_s = rest_s
        self._clock = clock
        self._failed = 0
        self._open_until = 0.0
        self._trying = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Wraps one call; an exception of it, cancellation too, counts as a failure.

        Raises CircuitOpen before the call begins when the circuit is open, or another call is the
        one that tries.
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
