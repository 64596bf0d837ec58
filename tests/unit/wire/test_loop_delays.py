"""For how long an event loop looks at nothing new is measured."""

from __future__ import annotations

import asyncio
import time

from gcore_core.wire.loop_delays import TimedLoop, latest_delays_s


def test_a_loop_that_was_busy_says_for_how_long() -> None:
    async def main() -> tuple[list[float], list[float]]:
        time.sleep(0.3)
        await asyncio.sleep(0)
        busy_s = latest_delays_s()
        await asyncio.sleep(0.3)  # it looks all the time
        return busy_s, latest_delays_s()

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        busy_s, idle_s = runner.run(main())
    assert max(busy_s) >= 0.3
    assert max(idle_s) < 0.3


async def test_another_event_loop_says_nothing() -> None:
    assert latest_delays_s() == []
