"""An event loop that rests while records come, so that those that come close together wake it once.

To wake up costs a controller several times as much as to take a record. In a long rollout records
come one by one from hundreds of replicas, and nobody is served by taking each at once. So while
records are drawn the loop sleeps for a small share of the time that the draw has taken, and then
takes all that has come. When few records are left it rests less: the last ones end the rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: The share of the time since a draw began for which the loop rests between two looks for events.
REST_SHARE = 0.03
#: The longest rest. A replica that has drawn its part may wait so long until it gets the next one.
LONGEST_REST_S = 0.1
#: The longest rest while anything else than records is waited for, such as an agreement.
URGENT_REST_S = 0.005
#: When less than this share of a draw's records is missing, the rest shrinks with what is missing.
TAIL_SHARE = 0.05
_DELAYS = 1 << 14  # so many delays are kept for a report


@dataclass
class Pace:
    """Says how far a draw of records is.

    records: how many it has.
    left: how many of them have not come; who draws counts it down.
    began_s: when it began, by the event loop's clock.
    """

    records: int
    left: int = field(init=False)
    began_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.left = self.records

    def rest_s(self, now_s: float) -> float:
        """Returns how long the loop may rest for this draw."""
        tail = min(1.0, max(0, self.left) / max(1.0, TAIL_SHARE * self.records))
        return tail * min(REST_SHARE * (now_s - self.began_s), LONGEST_REST_S)


class RestingLoop(asyncio.SelectorEventLoop):
    """Rests while it has nothing to do and a draw allows it."""

    def __init__(self) -> None:
        self._draws: list[Pace] = []
        self._n_urgent = 0
        self._selecting = _RestingSelector(self.rest_s)
        super().__init__(self._selecting)

    def take_delays_s(self) -> list[float]:
        """Returns the seconds between each two looks for events since this was called last.

        So long an event may have waited: while the loop did a turn's work and then rested. Only
        the latest ``_DELAYS`` are kept.
        """
        delays_s = list(self._selecting.delays_s)
        self._selecting.delays_s.clear()
        return delays_s

    def rest_s(self) -> float:
        """Returns how long the loop may sleep now whatever happens; 0: not at all."""
        if not self._draws:
            return 0.0
        now_s = self.time()
        rest_s = max(draw.rest_s(now_s) for draw in self._draws)
        return min(rest_s, URGENT_REST_S) if self._n_urgent else rest_s

    @contextlib.contextmanager
    def draw(self, pace: Pace) -> Iterator[None]:
        """Notes that records are drawn inside the block."""
        pace.began_s = self.time()
        self._draws.append(pace)
        try:
            yield
        finally:
            self._draws = [draw for draw in self._draws if draw is not pace]

    @contextlib.contextmanager
    def urgent(self) -> Iterator[None]:
        """Notes that an answer is waited for inside the block, which is to be taken soon."""
        self._n_urgent += 1
        try:
            yield
        finally:
            self._n_urgent -= 1


class _RestingSelector(selectors.DefaultSelector):
    """Sleeps before it waits for events.

    rest_s: says how long, each time.
    delays_s: the times from the end of one look to the beginning of the next.
    """

    def __init__(self, rest_s: Callable[[], float]) -> None:
        super().__init__()
        self._rest_s = rest_s
        self.delays_s = deque[float](maxlen=_DELAYS)
        self._looked_s = time.perf_counter()

    def select(self, timeout: float | None = None) -> Any:
        # With a timeout of 0 the loop has something to do and only looks what else has come.
        if (timeout is None or timeout > 0) and (rest_s := self._rest_s()) > 0:
            if timeout is not None:
                rest_s = min(rest_s, timeout)
                timeout -= rest_s
            time.sleep(rest_s)
        self.delays_s.append(time.perf_counter() - self._looked_s)
        events = super().select(timeout)
        self._looked_s = time.perf_counter()
        return events


def resting(pace: Pace) -> contextlib.AbstractContextManager[None]:
    """Lets the running event loop rest, inside the block; one that cannot rest goes on as ever."""
    loop = asyncio.get_running_loop()
    return loop.draw(pace) if isinstance(loop, RestingLoop) else contextlib.nullcontext()


def urgent() -> contextlib.AbstractContextManager[None]:
    """Keeps the running event loop from long rests, inside the block."""
    loop = asyncio.get_running_loop()
    return loop.urgent() if isinstance(loop, RestingLoop) else contextlib.nullcontext()


def latest_delays_s() -> list[float]:
    """Returns ``RestingLoop.take_delays_s`` of the running event loop; of another one nothing."""
    loop = asyncio.get_running_loop()
    return loop.take_delays_s() if isinstance(loop, RestingLoop) else []


def present_rest_s() -> float:
    """Returns how long the running event loop rests at this moment; 0 for one that cannot rest."""
    loop = asyncio.get_running_loop()
    return loop.rest_s() if isinstance(loop, RestingLoop) else 0.0
