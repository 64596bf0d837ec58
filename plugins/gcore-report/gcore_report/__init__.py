"""The plugin ``report``: TensorBoard scalars of every step, and ``curves.png`` at each evaluation and at the end.

Observers only; they write into the run's directory and keep no state between calls: event files are appended to, curves
are drawn from the run's metrics. Matplotlib and tensorboard are imported when first used.
"""

from __future__ import annotations

from pathlib import Path

from gcore_core import hookimpl
from gcore_core.records import RunFacts, StepReport


@hookimpl
def gcore_run_start(run: RunFacts) -> None:
    from gcore_report.scalars import start

    start(run)


@hookimpl
def gcore_step_end(run: RunFacts, report: StepReport) -> None:
    from gcore_report.scalars import add

    add(run, report)
    if report.evaluation:
        _draw(run)


@hookimpl
def gcore_run_end(run: RunFacts, error: str) -> None:
    _draw(run)


def _draw(run: RunFacts) -> None:
    from gcore_report.curves import draw

    draw(Path(run.directory))
