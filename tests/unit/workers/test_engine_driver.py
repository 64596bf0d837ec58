"""What counts as progress of an engine: a record that ends, not a step that returns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FINISHED, Prompt
from gcore_core.runtime.compute import ThreadCompute
from gcore_core.wire.service import to_wire
from gcore_core.workers.generator import EngineDriver

REQUEST = SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text=""))


class Engine:
    """Ends its sample at the step with this number; 0: never."""

    version = 0

    def __init__(self, last: int) -> None:
        self._last = last
        self.steps = 0

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        pass

    def step(self) -> list[Finished]:
        self.steps += 1
        if self.steps != self._last:
            return []
        return [Finished(request=REQUEST, status=FINISHED, versions=(0, 0))]

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        return []

    def close(self) -> None:
        pass


class Owner:
    def __init__(self) -> None:
        self.missing = 1
        self.shown = 0

    def owed(self) -> int:
        return self.missing

    def progress(self) -> None:
        self.shown += 1

    async def take(self, finished: list[Finished]) -> None:
        self.missing -= len(finished)

    def fail(self) -> None:
        self.missing = 0


async def test_a_record_that_ends_is_progress() -> None:
    engine = Engine(last=50)
    owner = Owner()
    driver = EngineDriver(engine, ThreadCompute(), 0.0, owner)
    await driver.submit([REQUEST])
    await driver.check()
    assert (owner.shown, engine.steps) == (1, 50)


async def test_steps_that_end_nothing_are_no_progress() -> None:
    engine = Engine(last=0)
    owner = Owner()
    driver = EngineDriver(engine, ThreadCompute(), 0.0, owner)
    await driver.submit([REQUEST])
    while engine.steps < 100:
        await asyncio.sleep(0.001)
    assert owner.shown == 0
    owner.missing = 0
    await driver.idle()


async def test_a_request_that_is_cancelled_leaves_the_engine_running_for_the_others() -> None:
    """All requests share the task that steps the engine: no one request may end it."""
    engine = Engine(last=0)
    owner = Owner()
    driver = EngineDriver(engine, ThreadCompute(), 0.0, owner)
    await driver.submit([REQUEST])
    cancelled = asyncio.ensure_future(driver.check())
    other = asyncio.ensure_future(driver.check())
    await asyncio.sleep(0)  # both wait for the engine now
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    steps = engine.steps
    while engine.steps < steps + 10:
        assert not other.done(), "the engine was stopped for a request that still waits"
        await asyncio.sleep(0)
    owner.missing = 0
    await other


class Broken(Engine):
    def step(self) -> list[Finished]:
        raise AttributeError("no such attribute")


async def test_every_request_is_told_the_line_of_the_engine_and_so_is_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = EngineDriver(Broken(last=0), ThreadCompute(), 0.0, Owner())
    await driver.submit([REQUEST])
    told = []
    for _ in range(3):
        with pytest.raises(AttributeError) as raised:
            await driver.check()
        told.append(to_wire(raised.value, "rollout.0").why)
    line = Broken.step.__code__.co_firstlineno + 1
    assert told == [f"at {__file__}:{line}"] * 3
    assert f'{__file__}", line {line}' in caplog.text
