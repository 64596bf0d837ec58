"""What a run shows on the terminal: phases before step 1, one line a step, a bar with the time
left, closing lines.

``open_display`` gives a live display (rich) when the stream is a terminal and plain lines
otherwise, in which case rich is not imported. Every step line carries the same parts; a metric that
a run does not have is left out.
"""

from __future__ import annotations

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
)


class Display(Protocol):
    """What the supervisor calls. Nothing here raises when the stream is gone: a closed pipe ends no
    run.
    """

    def phase(self, text: str, share: float | None = None) -> None:
        """Something before the first step: "making the model", ``share`` of it (0 to 1) done if
        that is known.
        """

    def step(self, report: StepReport) -> None:
        """One finished step; step 0 is the evaluation before the first."""

    def note(self, text: str) -> None:
        """A line among the others: an alarm, a warning."""

    def finish(self, lines: Iterable[str] = ()) -> None:
        """The last call: where things are. The terminal is as it was before. Calling it twice is
        harmless.
        """


def open_display(
    steps: int, stream: TextIO, clock: Clock = time.monotonic, *, repeats: bool = True
) -> Display:
    """A live display where ``stream`` is a terminal that can move its cursor, else plain lines.

    repeats: step lines show the latest evaluation until the next. A run that evaluates only at its
        start and its end would repeat the figure of its first weights.
    """
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return LiveDisplay(steps, stream, clock, repeats=repeats)
    return PlainDisplay(steps, stream, clock, repeats=repeats)


# -- what a line says ------------------------------------------------------------------------------


def step_parts(report: StepReport, steps: int, evaluation: Mapping[str, float]) -> list[Part]:
    """(label, value) of everything a step line shows; ``evaluation`` is the latest there was, if
    earlier.
    """
    metrics = report.metrics
    parts = [("step", f"{report.step:>{len(str(steps))}}/{steps}")]
    named = {
        key.removeprefix("reward/"): value
        for key, value in metrics.items()
        if key.startswith("reward/")
    }
    if "reward" in metrics:
        parts.append(("reward", f"{metrics['reward']:.3f}"))
    if len(named) > 1 or "reward" not in metrics:
        parts += [(name, f"{value:.3f}") for name, value in named.items()]
    parts += _held_out(evaluation)
    parts += [(label, form.format(metrics[key])) for key, label, form in _NUMBERS if key in metrics]
    parts += [(stage, f"{seconds:.2f}s") for stage, seconds in stage_seconds(metrics).items()]
    if report.evaluation and "seconds/evaluation" in metrics:
        parts.append(("evaluation", f"{metrics['seconds/evaluation']:.2f}s"))
    return parts


def _held_out(evaluation: Mapping[str, float]) -> list[Part]:
    """One number for the held-out prompts: the weighted reward if there is one, else the first;
    greedy if possible.
    """
    rewards = [key for key in evaluation if not key.endswith("/length")]
    if not rewards:
        return []
    rewards.sort(
        key=lambda key: (not key.startswith("greedy/"), not key.endswith("/reward"))
    )  # stable: else as given
    mode, _, name = rewards[0].partition("/")
    only = len({key.partition("/")[2] for key in rewards}) == 1 or name == "reward"
    label = " ".join(("held-out", *([] if only else [name]), *([] if mode == "greedy" else [mode])))
    return [(label, f"{evaluation[rewards[0]]:.3f}")]


def duration(seconds: float) -> str:
    """``0:07``, ``12:40``, ``3:05:00``."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class _Pace:
    """Seconds left, from the steps since the first report: that of step 0, or of the step a run was
    resumed from.
    """

    def __init__(self, steps: int, clock: Clock) -> None:
        self._steps, self._clock = steps, clock
        self._first: tuple[int, float] | None = None  # step, when

    def left_s(self, step: int) -> float | None:
        now_s = self._clock()
        if self._first is None:
            self._first = step, now_s
        first, since_s = self._first
        return (now_s - since_s) / (step - first) * (self._steps - step) if step > first else None


# -- plain lines -----------------------------------------------------------------------------------


class PlainDisplay:
    """One line for each thing said; for files, pipes and continuous integration."""

    def __init__(
        self,
        steps: int,
        stream: TextIO,
        clock: Clock = time.monotonic,
        *,
        repeats: bool = True,
    ) -> None:
        self._steps, self._stream, self._pace = steps, stream, _Pace(steps, clock)
        self._repeats = repeats
        self._evaluation: dict[str, float] = {}
        self._shown = ("", -1)

    def phase(self, text: str, share: float | None = None) -> None:
        quarter = -1 if share is None else int(share * 4)
        if (
            text,
            quarter,
        ) != self._shown:  # four lines for one piece of work, not one for each percent
            self._shown = (text, quarter)
            self.note(text if share is None else f"{text} {share:.0%}")

    def step(self, report: StepReport) -> None:
        earlier = self._evaluation if self._repeats else {}
        self._evaluation = report.evaluation or earlier
        parts = step_parts(report, self._steps, self._evaluation)
        left_s = self._pace.left_s(report.step)
        if len(parts) == 1:  # the state before the first step, not evaluated: nothing to tell
            return
        if left_s is not None:
            parts.append(("left", duration(left_s)))
        self.note("  ".join(f"{label} {value}" for label, value in parts))

    def note(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except (
            OSError,
            ValueError,
        ):  # the reader of the pipe has left, the disk is full, the stream is closed
            return

    def finish(self, lines: Iterable[str] = ()) -> None:
        for line in lines:
            self.note(line)


# -- a terminal ------------------------------------------------------------------------------------


class LiveDisplay:
    """Step lines scroll above one bar that stays at the bottom until ``finish``."""

    def __init__(
        self,
        steps: int,
        stream: TextIO,
        clock: Clock = time.monotonic,
        *,
        repeats: bool = True,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._steps, self._pace = steps, _Pace(steps, clock)
        self._repeats = repeats
        self._evaluation: dict[str, float] = {}
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
        earlier = self._evaluation if self._repeats else {}
        self._evaluation = report.evaluation or earlier
        parts = step_parts(report, self._steps, self._evaluation)
        if len(parts) > 1:
            self._print(_wrapped(parts, self._console.width))
        left_s, share = self._pace.left_s(report.step), report.step / self._steps
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
        """Without a share the bar pulses. A new task each time: rich cannot take a task's total
        away again.
        """
        with suppress(OSError):
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            percent = round(100 * (share or 0.0))
            self._progress.add_task(
                text, total=None if share is None else 100, completed=percent, tail=tail
            )


def _wrapped(parts: list[Part], width: int) -> Text:
    """The parts on as few lines as ``width`` allows, broken only between parts, later lines
    indented.
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
