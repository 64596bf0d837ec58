"""Shows a run that goes on: in a notebook by one output that changes, elsewhere by lines."""

from __future__ import annotations

import html
import importlib
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from gcore.views import Views
from gcore_core.contract.records import StepReport
from gcore_core.kits.calls import Display, PlainDisplay, open_display

_LINES = 12  # of steps, that a notebook shows while a run goes on
_REDRAW_S = 0.5  # least seconds between two changes of the bar and the lines; notes come at once
#: Least seconds between two pictures. One takes most of a second to draw, and the run has none to
#: spare on a laptop.
_PICTURE_S = 5.0


class Followed(Protocol):
    """Knows the directory of the run, once there is one."""

    directory: Path | None


def open_shown(steps: int, followed: Followed) -> Display:
    """Returns what shows a run here: in a notebook, on a terminal, or in a file."""
    if in_notebook():
        return NotebookDisplay(steps, followed)
    return open_display(steps, sys.stdout)


def in_notebook() -> bool:
    """Says whether this is the kernel of a notebook, whose outputs can be replaced."""
    module = sys.modules.get("IPython")  # whoever is in one has imported it
    shell = module.get_ipython() if module is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class _Lines:
    """Is a stream that keeps the last lines that were written."""

    def __init__(self) -> None:
        self.last: deque[str] = deque(maxlen=_LINES)

    def write(self, text: str) -> None:
        self.last.extend(line for line in text.splitlines() if line.strip())

    def flush(self) -> None:
        pass


class NotebookDisplay:
    """Shows a bar, the latest lines and a picture of the run in one output of a cell.

    The lines are those of ``PlainDisplay``. The picture is the first view that the run's plugins
    offer, and there is none where they offer none.
    """

    def __init__(self, steps: int, followed: Followed) -> None:
        self._steps = steps
        self._followed = followed
        self._lines = _Lines()
        self._plain = PlainDisplay(steps, self._lines)  # type: ignore[arg-type]
        self._bar = ("starting", 0.0)
        self._shown_at = 0.0
        self._drawn_at = time.monotonic()
        self._views: Views | None = None
        self._text = _shown(self._content(), raw=True)
        self._picture: Any = None

    def phase(self, text: str, share: float | None = None) -> None:
        self._plain.phase(text, share)
        self._bar = (text, share or 0.0)
        self._show()

    def step(self, report: StepReport) -> None:
        self._plain.step(report)
        self._bar = (f"step {report.step}/{self._steps}", report.step / self._steps)
        self._show()
        if report.step and time.monotonic() - self._drawn_at > _PICTURE_S:
            self._draw()

    def note(self, text: str) -> None:
        self._plain.note(text)
        self._show(now=True)

    def finish(self, lines: Iterable[str] = ()) -> None:
        lines = list(lines)
        if lines or self._bar[0] != "":
            self._bar = ("", 1.0)
            self._lines.last.extend(line for line in lines if line.strip())
            self._show(now=True)
            self._draw()

    def _show(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._shown_at > _REDRAW_S:
            self._shown_at = time.monotonic()
            self._text.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        title, share = self._bar
        bar = f"<progress value='{share:.3f}' max='1'></progress> {html.escape(title)}"
        text = "\n".join(self._lines.last)
        body = f"{bar if title else ''}<pre>{html.escape(text)}</pre>"
        return {"text/html": body, "text/plain": f"{title}\n{text}".strip()}

    def _draw(self) -> None:
        """Draws the run's picture anew; one that fails costs the picture, never the run."""
        if self._followed.directory is None:
            return
        self._drawn_at = time.monotonic()
        try:
            self._views = self._views or Views(self._followed.directory)
            picture = self._views.first()
        except Exception as error:
            self._lines.last.append(f"no picture: {error}")
            return
        if picture is None:
            return
        if self._picture is None:
            self._picture = _shown(picture)
        else:
            self._picture.update(picture)


def _shown(content: Any, **how: Any) -> Any:
    """Shows something in the cell's output, and returns what replaces it."""
    module: Any = importlib.import_module("IPython.display")
    return module.display(content, display_id=True, **how)
