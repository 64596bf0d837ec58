"""Drives one generator's backend: one call at a time, steps for as long as anything is owed."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from gcore_core.contract.generator import Finished, Generator, SampleRequest
from gcore_core.runtime.compute import Compute


class Owner(Protocol):
    """Gets what the engine makes, from the driver."""

    def owed(self) -> int:
        """Returns how many samples run for somebody."""

    def progress(self) -> None:
        """Tells those who wait that records have ended."""

    async def take(self, finished: list[Finished]) -> None:
        """Takes the records that have ended."""

    def fail(self) -> None:
        """Wakes those who wait, since the engine raised; ``EngineDriver.check`` raises it again."""


class EngineDriver:
    """Holds the backend's lock, and steps it while its owner is owed samples.

    Records that end are progress. In between only the backend knows whether it works: it calls
    ``WorkerContext.progress`` for actions that it has sampled.

    lock: whoever loads weights or puts the engine to sleep holds it, so that no step runs then.
    batch_s: seconds for which the engine steps on before its records are handed over, so that those
        that end close together travel in one message.
    """

    def __init__(self, backend: Generator, compute: Compute, batch_s: float, owner: Owner) -> None:
        self._backend = backend
        self._compute = compute
        self._owner = owner
        self._batch_s = batch_s
        self._driving: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()

    async def submit(self, requests: list[SampleRequest]) -> None:
        """Queues samples; begins to step when nothing ran."""
        async with self.lock:
            await self.submit_now(requests)

    async def submit_now(self, requests: list[SampleRequest]) -> None:
        """Does so for who holds the lock."""
        if not requests:
            return
        await self._compute(self._backend.submit, requests)
        if self._driving is None or self._driving.done():
            self._driving = asyncio.ensure_future(self._drive())

    async def check(self) -> None:
        """Raises what the engine raised. While it runs well, waits until nothing is owed."""
        if self._driving is not None:
            await asyncio.shield(self._driving)  # all requests share it

    async def idle(self) -> None:
        """Waits until nothing is owed, however the engine ends."""
        if self._driving is not None:
            await asyncio.wait([self._driving])

    async def _drive(self) -> None:
        try:
            while self._owner.owed():
                async with self.lock:
                    finished = await self._compute(self._step_for_a_while)
                if finished:  # an empty list is no sign: an engine may give it for ever
                    self._owner.progress()
                await self._owner.take(finished)
        except Exception:  # isolation point: every open request raises it
            self._owner.fail()
            raise

    def _step_for_a_while(self) -> list[Finished]:
        until_s = time.perf_counter() + self._batch_s
        finished = self._backend.step()
        while time.perf_counter() < until_s and len(finished) < self._owner.owed():
            finished += self._backend.step()
        return finished
