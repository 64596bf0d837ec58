"""Starts the process of a run, shows what it tells, and stops it on Ctrl-C."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from gcore import events
from gcore.child import Order
from gcore.finished import Run
from gcore.shown import open_shown
from gcore_core.contract.errors import GcoreError, WorkerDied
from gcore_core.kits.calls import Display

_SHOWN_LINES = 8
#: The number of the Ctrl-C that kills the process. The first one has the run save its state, the
#: second one ends it.
_AT_ONCE = 3
_INTERRUPTED = 130  # exit code of a run that Ctrl-C has stopped


class _Followed:
    """Holds what the process has told so far."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.error: GcoreError | None = None
        self.interrupts = 0  # how often Ctrl-C was passed on
        self._display: Display | None = None
        self._told_before: list[Callable[[Display], None]] = []

    def take(self, event: events.Event) -> None:
        """Shows one event, or keeps what it says: a display, the run's directory, its error.

        What comes before there is a display is not shown.
        """
        match event:
            case events.Shown():
                self._display = open_shown(event.steps, self)
            case events.Begun():
                self.directory = Path(event.directory)
            case events.Failed():
                self.error = event.error()
            case _ if self._display is not None:
                _show(self._display, event)

    def finish(self) -> None:
        if self._display is not None:
            self._display.finish()


def _show(display: Display, event: events.Event) -> None:
    match event:
        case events.Phase():
            display.phase(event.text, event.share)
        case events.Step():
            display.step(event.report)
        case events.Note():
            display.note(event.text)
        case events.Finish():
            display.finish(event.lines)


def follow(file: Path, overrides: Sequence[str], resume: Path | None = None) -> Run:
    """Runs a job in a process of its own until it ends, and returns the run.

    Raises the run's error as it was raised there, KeyboardInterrupt when Ctrl-C has stopped it.
    """
    followed = _Followed()
    with tempfile.TemporaryFile() as output:
        code = _run(file, overrides, resume, output, followed)
        followed.finish()
        if followed.error is not None:
            raise followed.error
        if code == _INTERRUPTED or (code < 0 and followed.interrupts):
            raise KeyboardInterrupt  # also where it was ended by one, before it could save
        if code != 0 or followed.directory is None:
            raise WorkerDied(
                f"the process of the run ended with exit code {code}",
                where=str(followed.directory or file),
                why=_last_lines(output),
                todo="logs are in the run's directory, logs/",
            )
    return Run(followed.directory)


def _run(
    file: Path,
    overrides: Sequence[str],
    resume: Path | None,
    output: IO[bytes],
    followed: _Followed,
) -> int:
    """Starts the process, takes its events until there are no more, returns its exit code."""
    # Two pipes. Events come out of the first. Nothing goes through the second one: its end tells
    # the process that this one is gone.
    told, telling = os.pipe()
    lifeline, alive = os.pipe()
    order = Order(
        file=str(file),
        overrides=list(overrides),
        resume=str(resume or ""),
        events=telling,
        lifeline=lifeline,
    )
    # A notebook's plots are not the run's: workers have no notebook to draw into.
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "gcore.child", msgspec.json.encode(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(telling, lifeline),
            env=environment,
            process_group=0,  # Ctrl-C on a terminal comes by this process alone, once
        )
    finally:
        os.close(telling)
        os.close(lifeline)
    try:
        with process:
            _take_all(told, process, followed)
            return process.wait()
    finally:
        os.close(alive)


def _take_all(told: int, process: subprocess.Popen[bytes], followed: _Followed) -> None:
    """Takes events until the last process that could tell has ended; passes Ctrl-C on."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:  # in a thread, as Ctrl-C would end a read half way through a line
        with os.fdopen(told, "rb") as file:
            for line in file:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="events of a run", daemon=True).start()
    while True:
        try:
            line = lines.get()
            if line is None:
                return
            followed.take(events.read(line))
        except KeyboardInterrupt:
            followed.interrupts += 1
            end = signal.SIGINT if followed.interrupts < _AT_ONCE else signal.SIGKILL
            process.send_signal(end)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise


def _last_lines(output: IO[Any]) -> str:
    output.seek(0)
    lines = output.read().decode("utf-8", "replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-_SHOWN_LINES:])
