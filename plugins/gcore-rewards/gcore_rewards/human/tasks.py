"""Defines what the page shows and what a task for raters is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

#: Longer than any look at a page: what a clock of a browser says beyond it is taken for this.
_LONGEST_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One button.

    value: what the form sends.
    text: what stands on it.
    key: the key that presses it, as browsers name it.
    shown_key: the key as it is shown; empty: as it is named.
    """

    value: str
    text: str
    key: str
    shown_key: str = ""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one page shows.

    key: names it in the form.
    prompt: text, or chat messages.
    answers: one text, or two: left, right.
    order: names the order of two, for the form.
    question: what is asked about one answer.
    """

    key: str
    prompt: str | list[dict[str, Any]]
    answers: tuple[str, ...]
    choices: tuple[Choice, ...]
    order: str = ""
    question: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Says how far raters are.

    own, own_of: what this rater has answered, and of how many there are for them.
    made, made_of: answers of all raters, and how many are wanted.
    """

    own: int
    own_of: int
    made: int
    made_of: int


class Task(Protocol):
    """What raters do on a page. Calls come one at a time.

    template: file of the page.
    title: stands above it.
    """

    template: ClassVar[str]
    title: ClassVar[str]

    def next(self, rater: str) -> Shown | None:
        """Returns what this rater sees next; None when there is nothing for them."""

    def answer(self, rater: str, form: Mapping[str, str]) -> None:
        """Writes a rater's answer; returns when it is on the disk.

        Raises Refusal for an answer that is not taken, OSError when it cannot be written.
        """

    def last(self, rater: str) -> int:
        """Returns the number of the rater's last answer; 0 for none."""

    def undo(self, rater: str, number: int) -> None:
        """Takes back the rater's last answer; raises as ``answer`` does."""

    def progress(self, rater: str) -> Progress:
        """Says how far the raters are."""

    def close(self) -> None:
        """Lets go of the file that is written."""


def seconds_of(form: Mapping[str, str]) -> float:
    """Returns the seconds that a rater looked at the page, as their browser says; 0 for unknown."""
    try:
        seconds = float(form.get("seconds", ""))
    except ValueError:
        return 0.0
    return round(min(max(seconds, 0.0), _LONGEST_S), 3) if math.isfinite(seconds) else 0.0
