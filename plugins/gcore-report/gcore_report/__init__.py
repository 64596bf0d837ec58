"""The plugin ``report``: TensorBoard scalars of every step, and ``curves.png`` at each evaluation and at the end.

Observers only; both write into the run's directory. Matplotlib and tensorboardX are imported when first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gcore_core import hookimpl
from gcore_core.records import RunFacts, StepReport

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


class Report:
    """Holds the open event file of each run, from ``gcore_run_start`` to ``gcore_run_end``.

    The hooks are methods, and the entry point names an object, because an event file has to stay open between steps: as
    functions of a module they would need module state. Runs are kept apart by their directory.
    """

    def __init__(self) -> None:
        self._events: dict[str, EventsWriter] = {}

    @hookimpl
    def gcore_run_start(self, run: RunFacts) -> None:
        from gcore_report.scalars import open_events

        self._events[run.directory] = open_events(run)

    @hookimpl
    def gcore_step_end(self, run: RunFacts, report: StepReport) -> None:
        from gcore_report.scalars import add

        add(self._events[run.directory], report)
        if report.evaluation:
            self._draw(run)

    @hookimpl
    def gcore_run_end(self, run: RunFacts, error: str) -> None:
        events = self._events.pop(run.directory, None)  # absent when the run failed before its processes were up
        if events is not None:
            events.close()
        self._draw(run)

    def _draw(self, run: RunFacts) -> None:
        from gcore_report.curves import draw

        draw(Path(run.directory))


plugin = Report()
