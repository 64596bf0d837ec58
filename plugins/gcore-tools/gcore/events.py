"""Says what goes from the process of a run to its viewer: a JSON object a line."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gcore_core.contract.errors import GcoreError, error_types
from gcore_core.contract.records import StepReport


class Shown(msgspec.Struct, tag="shown", frozen=True):
    """Opens the display.

    steps: of the whole run.
    """

    steps: int


class Phase(msgspec.Struct, tag="phase", frozen=True):
    """See ``Display.phase``."""

    text: str
    share: float | None


class Note(msgspec.Struct, tag="note", frozen=True):
    """See ``Display.note``."""

    text: str


class Step(msgspec.Struct, tag="step", frozen=True):
    """See ``Display.step``; the samples of a report stay where they are.

    metrics, evaluation: as in the report; JSON has null for NaN and infinities.
    """

    step: int
    version: int
    metrics: Mapping[str, float | None]
    evaluation: Mapping[str, float | None]

    @property
    def report(self) -> StepReport:
        """Returns the report, with NaN for what was no finite number."""
        return StepReport(
            step=self.step,
            version=self.version,
            metrics=_numbers(self.metrics),
            evaluation=_numbers(self.evaluation),
        )


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """See ``Display.finish``."""

    lines: list[str]


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """Names the run's directory, as soon as it is there."""

    directory: str


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Carries an error of G-Core; its facts stay behind."""

    kind: str
    what: str
    where: str
    why: str
    todo: str

    @classmethod
    def of(cls, error: GcoreError) -> Failed:
        kind = type(error).__name__
        return cls(kind=kind, what=error.what, where=error.where, why=error.why, todo=error.todo)

    def error(self) -> GcoreError:
        """Returns the error as it was, or its nearest kind that this process knows."""
        kind = error_types().get(self.kind, GcoreError)
        return kind(self.what, where=self.where, why=self.why, todo=self.todo)


Event = Shown | Phase | Note | Step | Finish | Begun | Failed


class EventDisplay:
    """Is the display of a run whose viewer is another process."""

    def __init__(self, pipe: int, steps: int) -> None:
        self._pipe = pipe
        send(pipe, Shown(steps=steps))

    def phase(self, text: str, share: float | None = None) -> None:
        send(self._pipe, Phase(text=text, share=share))

    def step(self, report: StepReport) -> None:
        event = Step(
            step=report.step,
            version=report.version,
            metrics=report.metrics,
            evaluation=report.evaluation,
        )
        send(self._pipe, event)

    def note(self, text: str) -> None:
        send(self._pipe, Note(text=text))

    def finish(self, lines: Iterable[str] = ()) -> None:
        send(self._pipe, Finish(lines=list(lines)))


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def send(pipe: int, event: Event) -> None:
    """Writes an event; where nobody reads any more, it is dropped: the run goes on."""
    line = memoryview(msgspec.json.encode(event, enc_hook=float) + b"\n")
    try:
        while line:
            line = line[os.write(pipe, line) :]
    except OSError:
        return


def read(line: bytes) -> Event:
    event: Any = msgspec.json.decode(line, type=Event)
    return event  # type: ignore[no-any-return]
