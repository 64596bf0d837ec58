"""TensorBoard event files: one per start of a run, one event a step."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from gcore_core.records import RunFacts, StepReport
from gcore_core.run.directory import TENSORBOARD


def open_events(run: RunFacts) -> EventsWriter:
    """An event file in the run's ``tensorboard/``, for this start of the run.

    EventsWriter and not SummaryWriter, which hands events to a thread through a queue that ``flush`` does not wait for:
    here what was added is in the file when ``add`` returns, and the supervisor has no thread more.
    """
    directory = Path(run.directory, TENSORBOARD)
    directory.mkdir(exist_ok=True)
    events = EventsWriter(str(directory / "events"), f".{run.resumed_from}")
    if run.resumed_from:  # the steps after it are made again: TensorBoard drops those of the first attempt
        log = SessionLog(status=SessionLog.START)
        events.write_event(Event(wall_time=time.time(), step=run.resumed_from + 1, session_log=log))
    return events


def add(events: EventsWriter, report: StepReport) -> None:
    """Writes every metric of a step under its name, and what was evaluated under ``evaluation/``."""
    scalars = report.metrics | {f"evaluation/{name}": value for name, value in report.evaluation.items()}
    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    events.write_event(Event(wall_time=time.time(), step=report.step, summary=Summary(value=values)))
    events.flush()
