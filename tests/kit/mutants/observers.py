"""Observers with one fault each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from gcore_testing import ObserverContract
from gcore_testing.fake import FakeObserver

from gcore_core.contract import run_files
from gcore_core.contract.observer import Observer, ObserverContext
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure


class Clean(ObserverContract):
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[Any] = FakeObserver

    def made(self, context: ObserverContext) -> Observer:
        observer: Observer = self.Backend(None, context)
        return observer


class LacksAMethod(Clean):
    caught_by = ("test_it_can_be_told_everything", "test_a_whole_run_is_taken")

    class Backend(FakeObserver):
        weights_published = None  # type: ignore[assignment]


class WaitsForSomebody(Clean):
    caught_by = ("test_it_can_be_told_everything",)

    class Backend(FakeObserver):
        async def worker_failed(self, failure: WorkerFailure) -> None:  # type: ignore[override]
            pass


class ExpectsTheSameMetricsAlways(Clean):
    caught_by = ("test_a_whole_run_is_taken",)

    class Backend(FakeObserver):
        def step_end(self, report: StepReport) -> None:
            if report.metrics:
                assert set(report.metrics) == self.__dict__.setdefault("names", {*report.metrics})


class ExpectsEveryStepOnce(Clean):
    caught_by = ("test_a_run_that_goes_back_to_a_checkpoint_is_taken",)

    class Backend(FakeObserver):
        def step_end(self, report: StepReport) -> None:
            latest = self.__dict__.get("latest", -1)
            assert report.step > latest
            self.__dict__["latest"] = report.step


class BeginsANewFile(Clean):
    caught_by = ("test_a_resumed_run_is_taken_by_another_process",)

    class Backend(FakeObserver):
        def __init__(self, config: None, context: ObserverContext) -> None:
            super().__init__(config, context)
            (Path(context.directory) / "begun").touch(exist_ok=False)


class KnowsOneReplicaAlone(Clean):
    caught_by = ("test_a_run_that_fails_is_taken",)

    class Backend(FakeObserver):
        def worker_failed(self, failure: WorkerFailure) -> None:
            assert failure.rank == 0


class OpensTheCheckpoint(Clean):
    caught_by = ("test_a_checkpoint_that_was_removed_meanwhile_is_taken",)

    class Backend(FakeObserver):
        def checkpoint_saved(self, step: int, path: str) -> None:
            list(Path(path).iterdir())


class AddsToTheConfiguration(Clean):
    caught_by = ("test_arguments_and_the_files_of_the_run_stay_as_they_are",)

    class Backend(FakeObserver):
        def run_start(self, run: RunFacts) -> None:
            run.config["observed"] = True


class WritesTheRunsMetrics(Clean):
    caught_by = ("test_arguments_and_the_files_of_the_run_stay_as_they_are",)

    class Backend(FakeObserver):
        def run_end(self, error: str) -> None:
            (self._directory / run_files.METRICS).write_text("")
