"""Colours are on a terminal, and nowhere where nobody sees them."""

from __future__ import annotations

import io
import re

import pytest

from gcore_core.contract.records import StepReport
from gcore_core.run.display import open_display

CONTROL = "\x1b["
#: Select graphic rendition with a colour: 30-37, 90-97 and 38;... of the foreground, 40 and so on.
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    display = open_display(2, stream)
    display.phase("making the model", 0.5)
    display.step(StepReport(step=1, version=1, metrics={"reward": 0.5}))
    display.finish(["the run is in runs/x/001"])
    return stream.getvalue()


def test_a_pipe_gets_plain_text_even_where_colours_are_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert CONTROL not in shown(io.StringIO())


@pytest.mark.parametrize("no_colour", [False, True])
def test_a_terminal_has_colours_unless_they_are_refused(
    monkeypatch: pytest.MonkeyPatch, no_colour: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    text = shown(Terminal())
    assert CONTROL in text  # it moves its cursor in any case
    assert bool(COLOUR.search(text)) is not no_colour
