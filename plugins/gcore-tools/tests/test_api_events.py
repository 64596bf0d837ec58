"""What a run tells its viewer arrives as it was."""

from __future__ import annotations

import math
import os

from gcore import events

from gcore_core.contract.records import StepReport


def arrived(report: StepReport) -> StepReport:
    """The report as the viewer of a run gets it."""
    reading, writing = os.pipe()
    events.EventDisplay(writing, 3).step(report)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        _, step = map(events.read, file)
    assert isinstance(step, events.Step)
    return step.report


def test_a_step_arrives_with_its_numbers() -> None:
    report = StepReport(step=1, version=1, metrics={"kl": 0.5}, evaluation={"greedy/right": 1.0})
    assert arrived(report) == report


def test_metrics_that_are_no_numbers_do_not_end_the_viewer() -> None:
    metrics = {"loss": math.nan, "kl": math.inf, "reward": 0.5}
    report = arrived(StepReport(step=2, version=2, metrics=metrics))
    assert report.step == 2 and report.metrics["reward"] == 0.5
    assert math.isnan(report.metrics["loss"]) and math.isnan(report.metrics["kl"])
