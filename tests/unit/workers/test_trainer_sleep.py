"""A trainer's rank that sleeps while generators draw."""

from __future__ import annotations

import time
from typing import Any

from gcore_core.runtime.compute import ThreadCompute
from gcore_core.workers.trainer import WakingCompute


class Sleeper:
    """A backend whose sleep and wake take a while."""

    def sleep(self) -> None:
        time.sleep(0.01)

    def wake(self) -> None:
        time.sleep(0.01)


async def test_a_sleep_that_is_asked_again_says_the_same_seconds() -> None:
    """As after a reply that is lost: the step's metrics have the seconds all the same."""
    backend: Any = Sleeper()
    rest = WakingCompute(backend, ThreadCompute())
    await rest.sleep()
    await rest(lambda: None)
    first = await rest.sleep()
    assert first.sleep_s >= 0.01 and first.wake_s >= 0.01
    assert await rest.sleep() == first
    await rest(lambda: None)
    assert await rest.sleep() != first
