"""An event loop that notes for how long it looks at nothing new."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque
from typing import Any

_DELAYS = 1 << 14  # so many are kept for a report


class TimedLoop(asyncio.SelectorEventLoop):
    """Measures the time between each two looks for events: so long an event may have waited."""

    def __init__(self) -> None:
        self._selecting = _TimedSelector()
        super().__init__(self._selecting)

    def take_delays_s(self) -> list[float]:
        """Returns the latest delays since this was called last, ``_DELAYS`` at most."""
        delays_s = list(self._selecting.delays_s)
        self._selecting.delays_s.clear()
        return delays_s


class _TimedSelector(selectors.DefaultSelector):
    """Notes the times from the end of one look to the beginning of the next.

    delays_s: the latest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.delays_s = deque[float](maxlen=_DELAYS)
        self._looked_s = time.perf_counter()

    def select(self, timeout: float | None = None) -> Any:
        self.delays_s.append(time.perf_counter() - self._looked_s)
        events = super().select(timeout)
        self._looked_s = time.perf_counter()
        return events


def latest_delays_s() -> list[float]:
    """Returns ``TimedLoop.take_delays_s`` of the running event loop; of another one nothing."""
    loop = asyncio.get_running_loop()
    return loop.take_delays_s() if isinstance(loop, TimedLoop) else []
