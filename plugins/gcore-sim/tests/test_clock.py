"""What is spent passes: on the loop's clock where a loop runs the backend, by sleeping in a
thread.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from gcore_sim.clock import LoopCompute, spend

from gcore_core.testing.simulation import run_virtual


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


def test_without_an_event_loop_the_clock_really_sleeps() -> None:
    began_s = time.monotonic()
    spend(0.05)
    assert time.monotonic() - began_s >= 0.05
