"""What is spent passes: on the loop's clock where a loop runs the backend, by sleeping in a
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
from gcore_placement.sim.clock import LoopCompute, spend
from gcore_testing.simulation import VirtualLoop, run_virtual


def test_a_call_returns_after_its_duration_and_calls_run_one_after_another() -> None:
    async def main() -> list[tuple[str, float]]:
        compute, loop = LoopCompute(), asyncio.get_running_loop()
        answered: list[tuple[str, float]] = []

        async def call(name: str, seconds: float) -> None:
            await compute(spend, seconds)
            answered.append((name, loop.time()))

        await asyncio.gather(call("long", 100.25), call("none", 0.0), call("short", 0.5))
        return answered

    expected = [("long", 100.25), ("none", 100.25), ("short", 100.75)]
    found = run_virtual(main())
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [at_s for _, at_s in found] == pytest.approx([at_s for _, at_s in expected], abs=1e-6)


def test_backends_pass_time_concurrently() -> None:
    async def main() -> float:
        await asyncio.gather(*(LoopCompute()(spend, 10.0) for _ in range(50)))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10.0, abs=1e-6)


def test_progress_is_reported_every_second() -> None:
    told: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await LoopCompute()(spend, 3.5, lambda: told.append(loop.time()))

    run_virtual(main())
    assert told == pytest.approx([1, 2, 3], abs=1e-6)


class LateLoop(VirtualLoop):
    """Has timers that fire 3 ms late, as those of a busy loop do."""

    def call_later(self, delay: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
        return super().call_later(delay + 0.003 if delay > 0 else 0, *args, **more)


def test_timers_that_are_late_do_not_make_a_backend_slower() -> None:
    """Or an engine of short steps would be slower by that for each of them."""
    loop = LateLoop()

    async def main() -> list[float]:
        compute = LoopCompute()
        answered = []
        for seconds in [0.01] * 100 + [0.001] * 100:  # the latter are shorter than timers are late
            await compute(spend, seconds)
            answered.append(loop.time())
        return answered

    with contextlib.closing(loop):
        answered = loop.run_until_complete(main())
    assert answered[99] == pytest.approx(1.0, abs=0.0031)
    assert answered[-1] == pytest.approx(1.1, abs=0.0041)


def test_without_an_event_loop_the_clock_really_sleeps() -> None:
    began_s = time.monotonic()
    spend(0.05)
    assert time.monotonic() - began_s >= 0.05
