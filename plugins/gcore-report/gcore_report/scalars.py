"""Writes TensorBoard event files: one for each step at which a run started, one event a step."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.contract.run_files import TENSORBOARD

_NAME = "events.out.tfevents.{}.gcore"


def start(run: RunFacts) -> None:
    """Makes the event file of this start of the run.

    Files of starts from later steps are removed: what is in them is made again.
    """
    events = _events(run)
    for file in events.parent.glob(_NAME.format("*")):
        if file.name > events.name:
            file.unlink(missing_ok=True)
    is_again = events.exists()
    if not is_again:
        events.parent.mkdir(exist_ok=True)
        _append(events, Event(wall_time=time.time(), file_version="brain.Event:2"))
    # The steps after it are made again: TensorBoard drops those of the first attempt.
    if run.resumed_from or is_again:
        log = SessionLog(status=SessionLog.START)
        _append(events, Event(wall_time=time.time(), step=run.resumed_from + 1, session_log=log))


def add(run: RunFacts, report: StepReport) -> None:
    """Writes every metric of a step under its name, and evaluations under ``evaluation/``."""
    scalars = report.metrics | {
        f"evaluation/{name}": value for name, value in report.evaluation.items()
    }
    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    _append(
        _events(run), Event(wall_time=time.time(), step=report.step, summary=Summary(value=values))
    )


def _events(run: RunFacts) -> Path:
    """Names the event file so that TensorBoard reads it, after those of earlier steps.

    TensorBoard reads every file with "tfevents" in its name, in the order of their names.
    """
    return Path(run.directory, TENSORBOARD, _NAME.format(f"{run.resumed_from:06d}"))


def _append(file: Path, event: Event) -> None:
    """Appends one event to a file.

    TensorBoard's own file writer is not used: it would keep a thread and a queue between two steps.
    """
    with file.open("ab") as stream:
        RecordWriter(stream).write(event.SerializeToString())
