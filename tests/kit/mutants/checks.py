"""Step checks with one fault each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from gcore_testing import StepCheckContract
from gcore_testing.contracts.step_check import FakeWorkers

from gcore_core.builtin.band import Band, Comparing
from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.sentinel import SentinelContext
from gcore_core.contract.step_check import Evidence, StepCheckContext


class Asking(Comparing):
    """The kernel's step check, which also has generators score records, and counts its steps."""

    def __init__(self, config: None, context: StepCheckContext) -> None:
        super().__init__(config, context)
        self._steps = 0
        self._workers = context.workers
        self._scoring: asyncio.Task[Any] | None = None

    async def updated(self, step: int, evidence: Evidence) -> dict[str, float]:
        self._steps += 1
        return {**await super().updated(step, evidence), "sentinel/steps": float(self._steps)}

    async def pushed(self, version: int) -> None:
        shown = await self._workers.scored_by_trainer(version, 8)
        self._scoring = asyncio.ensure_future(self._workers.scored_by_generators(version, shown))

    async def before_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        if self._scoring is not None:
            records = await self._scoring
            self._scoring = None
            numbers = self._sentinel.weigh(self._sentinel.measure(records))
            for record, row in zip(records, numbers, strict=True):
                await super().updated(2, {(record.replica, 2): row})
        return dict(metrics)

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._steps = int(state["steps"])

    def end(self) -> None:
        if self._scoring is not None:
            self._scoring.cancel()
            self._scoring = None


class Clean(StepCheckContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[Asking]] = Asking

    def sentinel(self) -> Band:
        return Band(None, SentinelContext(band=self.band, replicas=2))

    def made(self, workers: FakeWorkers) -> Asking:
        return self.Backend(
            None,
            StepCheckContext(
                sentinel=self.sentinel(), provider="mine", workers=workers, saves=True
            ),
        )


class LetsTheRunGoOn(Clean):
    caught_by = (
        "test_a_gap_over_the_band_ends_the_run_and_names_the_replica",
        "test_a_generator_that_scores_otherwise_ends_the_run_before_an_update",
    )

    class Backend(Asking):
        async def updated(self, step: int, evidence: Evidence) -> dict[str, float]:
            try:
                return await super().updated(step, evidence)
            except WeightMismatch:
                return {}

        async def before_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
            try:
                return await super().before_update(metrics)
            except WeightMismatch:
                return dict(metrics)


class DropsMetrics(Clean):
    caught_by = (
        "test_metrics_of_a_step_stay",
        "test_records_that_are_scored_again_alike_end_no_run",
    )

    class Backend(Asking):
        async def before_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
            await super().before_update(metrics)
            return {}


class ForgetsOnResuming(Clean):
    caught_by = ("test_a_resumed_run_checks_alike",)

    class Backend(Asking):
        def restore(self, state: Mapping[str, Any]) -> None: ...


class GoesOnAfterTheEnd(Clean):
    caught_by = ("test_nothing_goes_on_after_the_end",)

    class Backend(Asking):
        async def pushed(self, version: int) -> None:
            self._scoring = asyncio.ensure_future(asyncio.sleep(60))

        async def before_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
            return dict(metrics)

        def end(self) -> None: ...


class StopsAnyRun(Clean):
    caught_by = (
        "test_equal_log_probs_never_end_a_run",
        "test_a_resumed_run_checks_alike",
        "test_records_that_are_scored_again_alike_end_no_run",
        "test_a_gap_over_the_band_ends_the_run_and_names_the_replica",
        "test_a_generator_that_scores_otherwise_ends_the_run_before_an_update",
        "test_nothing_goes_on_after_the_end",
    )

    class Backend(Asking):
        async def updated(self, step: int, evidence: Evidence) -> dict[str, float]:
            raise WeightMismatch("it is a step")


class NotesNothing(Clean):
    caught_by = ("test_notes_are_lines_for_a_person",)

    class Backend(Asking):
        def notes(self) -> list[str]:
            return [""]
