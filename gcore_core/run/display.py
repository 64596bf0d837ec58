"""Shows the progress of a run on the terminal.

It shows phases before step 1, then one line for each step and a bar with the time left, and closing
lines at the end. ``open_display`` returns a live display (rich) when the stream is a terminal.
Otherwise it returns plain lines, and rich is not imported. Every step line has the same parts,
except that a metric that a run does not have is left out.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TextIO

from gcore_core.contract.records import StepReport
from gcore_core.contract.run_files import stage_seconds

if TYPE_CHECKING:
    from rich.text import Text

Clock = Callable[[], float]
Part = tuple[str, str]  # label, value

_NUMBERS = (  # metric, label, format
    ("kl", "kl", "{:.1e}"),
    ("entropy", "entropy", "{:.3f}"),
    ("length", "length", "{:.1f}"),
    ("logprob_gap_max", "gap", "{:.1e}"),
    ("actions_per_s", "actions/s", "{:,.0f}"),
    ("placement/idle_share", "idle", "{:.0%}"),
    ("age/mean", "age", "{:.1f}"),
    ("age/largest", "oldest", "{:.0f}"),
)


class Display(Protocol):
    """Shows the progress of a run; the supervisor calls it.

    No method raises when the stream is gone: a closed pipe does not end a run.
    """

    def phase(self, text: str, share: float | None = None) -> None:
        """Shows what is done before the first step, such as "making the model".

        share: how much of it is done, 0 to 1; None when that is not known.
        """

    def step(self, report: StepReport) -> None:
        """Shows one finished step. Step 0 is the evaluation before the first step."""

    def note(self, text: str) -> None:
        """Shows a line of text among the steps, such as a warning."""

    def finish(self, lines: Iterable[str] = ()) -> None:
        """Shows the closing lines and leaves the terminal as it was before the run.

        It is the last call; calling it twice is harmless.
        """


def open_display(steps: int, stream: TextIO, clock: Clock = time.monotonic) -> Display:
    """Returns a live display if ``stream`` is a terminal that can move its cursor; plain lines
    elsewhere.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        # A name that the terminal cannot spell must neither end the run nor go unsaid.
        stream.reconfigure(errors="backslashreplace")
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return LiveDisplay(steps, stream, clock)
    return PlainDisplay(steps, stream, clock)


# -- the parts of a line ---------------------------------------------------------------------------


def step_parts(report: StepReport, steps: int) -> list[Part]:
    """Returns (label, value) of everything that a step line shows.

    steps: number of steps of the whole run.
    """
    metrics = report.metrics
    parts = [("step", f"{report.step:>{len(str(steps))}}/{steps}")]
    rewards = {
        key.removeprefix("reward/"): value
        for key, value in metrics.items()
        if key.startswith("reward/")
    }
    if "reward" in metrics:
        parts.append(("reward", f"{metrics['reward']:.3f}"))
    if len(rewards) > 1 or "reward" not in metrics:
        parts += [(name, f"{value:.3f}") for name, value in rewards.items()]
    parts += _held_out(report.evaluation)
    parts += [(label, form.format(metrics[key])) for key, label, form in _NUMBERS if key in metrics]
    parts += [(stage, f"{seconds:.2f}s") for stage, seconds in stage_seconds(metrics).items()]
    if report.evaluation and "seconds/evaluation" in metrics:
        parts.append(("evaluation", f"{metrics['seconds/evaluation']:.2f}s"))
    return parts


def _held_out(evaluation: Mapping[str, float]) -> list[Part]:
    """Returns one number for the held-out prompts, or nothing when there is none.

    It is taken from greedy answers if there are any. Of their rewards it is the weighted reward if
    there is one, else the first.
    """
    rewards = [key for key in evaluation if not key.endswith("/length")]
    if not rewards:
        return []
    # False sorts before True, and the sort is stable: equal keys stay in the order given.
    rewards.sort(key=lambda key: (not key.startswith("greedy/"), not key.endswith("/reward")))
    mode, _, name = rewards[0].partition("/")
    only = len({key.partition("/")[2] for key in rewards}) == 1 or name == "reward"
    label = " ".join(("held-out", *([] if only else [name]), *([] if mode == "greedy" else [mode])))
    return [(label, f"{evaluation[rewards[0]]:.3f}")]


def duration(seconds: float) -> str:
    """Formats seconds as ``0:07``, ``12:40`` or ``3:05:00``."""
    minutes, remainder_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder_s:02d}" if hours else f"{minutes}:{remainder_s:02d}"


class _Pace:
    """Estimates the seconds left from the mean time of the steps since the first one that ended.

    That first step is not counted: it compiles, fills caches and checks its gradient, and takes
    up to twice as long as the others.
    """

    def __init__(self, steps: int, clock: Clock) -> None:
        self._steps = steps
        self._clock = clock
        self._first: tuple[int, float] | None = None  # the first step, and when it ended

    def left_s(self, step: int) -> float | None:
        """Returns the seconds that are left after a step; None while that is not known.

        step: 0 is the evaluation before the first step.
        """
        now_s = self._clock()
        if self._first is None:
            self._first = (step, now_s) if step else None
            return None
        first, since_s = self._first
        return (now_s - since_s) / (step - first) * (self._steps - step) if step > first else None


# -- plain lines -----------------------------------------------------------------------------------


class PlainDisplay:
    """Prints one plain line for each call; for files, pipes and continuous integration."""

    def __init__(
        self,
        steps: int,
        stream: TextIO,
        clock: Clock = time.monotonic,
    ) -> None:
        self._steps = steps
        self._stream = stream
        self._pace = _Pace(steps, clock)
        self._last_phase = ("", -1)

    def phase(self, text: str, share: float | None = None) -> None:
        quarter = -1 if share is None else int(share * 4)
        # One line for each quarter of a piece of work, not one for each percent.
        if (text, quarter) != self._last_phase:
            self._last_phase = (text, quarter)
            self.note(text if share is None else f"{text} {share:.0%}")

    def step(self, report: StepReport) -> None:
        parts = step_parts(report, self._steps)
        left_s = self._pace.left_s(report.step)
        # Step 0 without an evaluation has nothing but its number to show.
        if len(parts) == 1:
            return
        if left_s is not None:
            parts.append(("left", duration(left_s)))
        self.note("  ".join(f"{label} {value}" for label, value in parts))

    def note(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):
            # The reader of the pipe has left, the disk is full, or the stream is closed.
            return

    def finish(self, lines: Iterable[str] = ()) -> None:
        for line in lines:
            self.note(line)


# -- a terminal ------------------------------------------------------------------------------------


class LiveDisplay:
    """Prints step lines above one bar, which stays at the bottom until ``finish``."""

    def __init__(
        self,
        steps: int,
        stream: TextIO,
        clock: Clock = time.monotonic,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._steps = steps
        self._pace = _Pace(steps, clock)
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[tail]}", markup=False, style="dim"),
            console=self._console,
            transient=True,
        )
        self._show_bar("starting", None, "")
        self._progress.start()

    def phase(self, text: str, share: float | None = None) -> None:
        self._show_bar(text, share, "" if share is None else f"{share:.0%}")

    def step(self, report: StepReport) -> None:
        parts = step_parts(report, self._steps)
        if len(parts) > 1:
            self._print(_wrapped(parts, self._console.width))
        left_s = self._pace.left_s(report.step)
        share = report.step / self._steps
        tail = "" if left_s is None else f"{share:.0%}  {duration(left_s)} left"
        self._show_bar(f"step {report.step}/{self._steps}", share, tail)

    def note(self, text: str) -> None:
        self._print(text)

    def finish(self, lines: Iterable[str] = ()) -> None:
        with suppress(OSError):
            self._progress.stop()
        for line in lines:
            self._print(line)

    def _print(self, line: str | Text) -> None:
        with suppress(OSError):  # the terminal is gone; the run is not
            self._console.print(line, soft_wrap=True)

    def _show_bar(self, text: str, share: float | None, tail: str) -> None:
        """Replaces the bar; without a share, the new one pulses.

        Each call makes a new task, because rich cannot take a task's total away again.
        """
        with suppress(OSError):
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            percent = round(100 * (share or 0.0))
            self._progress.add_task(
                text, total=None if share is None else 100, completed=percent, tail=tail
            )


def _wrapped(parts: list[Part], width: int) -> Text:
    """Puts the parts on as few lines as ``width`` allows.

    Lines break only between parts, and all but the first are indented.
    """
    from rich.text import Text

    lines = [Text()]
    for label, value in parts:
        part = Text.assemble((label, "dim"), " ", value)
        if lines[-1].cell_len and lines[-1].cell_len + 2 + part.cell_len > width:
            lines.append(Text("    "))
        elif lines[-1].cell_len:
            lines[-1].append("  ")
        lines[-1].append_text(part)
    return Text("\n").join(lines)
