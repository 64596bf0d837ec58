"""The plugin ``report`` shows runs: TensorBoard, ``curves.png`` and the page of ``g-core report``.

Named by a job, it writes TensorBoard scalars of every step and draws ``curves.png``.

The picture is drawn at evaluations, not more often than every half minute, and at the end. All
hooks here only observe. They write into the run's directory and keep no state between calls: event
files are appended to, curves are drawn from the run's metrics. Matplotlib and tensorboard are
imported when first used.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_core import hookimpl
from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.contract.run_files import CURVES, SAMPLES

if TYPE_CHECKING:
    from gcore_core.contract.providers import CommandProvider, ViewProvider

REDRAW_S = 30.0  # the run waits for hooks like these, and a picture takes most of a second


@hookimpl
def gcore_views() -> Iterable[ViewProvider]:
    from gcore_core.contract.providers import ViewProvider  # see gcore_commands

    yield ViewProvider(
        name="curves",
        summary="rewards, lengths, KL, gap and time of each step, as in curves.png",
        factory="gcore_report.curves:view",
    )


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    from gcore_core.contract.providers import CommandProvider  # brings numpy, observers need none

    yield CommandProvider(
        summary="one HTML file that shows a run, or compares several",
        factory="gcore_report.commands:report",
    )


@hookimpl
def gcore_run_start(run: RunFacts) -> None:
    from gcore_report.scalars import start

    start(run)


@hookimpl
def gcore_step_end(run: RunFacts, report: StepReport) -> None:
    from gcore_report.scalars import add

    add(run, report)
    if report.evaluation and _age_s(run) > REDRAW_S:
        _draw(run)


@hookimpl
def gcore_run_end(run: RunFacts, error: str) -> None:
    _draw(run)


def _age_s(run: RunFacts) -> float:
    """Returns the seconds since the picture was drawn.

    Before there is a picture, returns the seconds since the run made its directories.
    """
    picture = Path(run.directory, CURVES)
    return (
        time.time()
        - (picture if picture.exists() else Path(run.directory, SAMPLES)).stat().st_mtime
    )


def _draw(run: RunFacts) -> None:
    """Draws the picture from the files of the run."""
    from gcore_report.curves import draw

    draw(Path(run.directory))
