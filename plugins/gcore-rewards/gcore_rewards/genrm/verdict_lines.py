"""Reads the line on which a judge gives its verdict, such as ``Score: 7``.

A judge may repeat what a completion says, and a completion may hold a line of the asked form. So:

- A line counts only when it has the asked form from its beginning to its end. A line that begins
  with ``>``, a backtick or a quotation mark, and a form that stands behind other words, are
  quotations.
- A line between code fences, or between an opening and a closing quotation mark, is no verdict.
  It still has a say: when it differs from the verdict, nothing is read. Otherwise a completion that
  holds a fence or a quotation mark could make the judge's own line look like the quoted one.
- Lines that differ are no verdict, and neither is a line that begins like one and cannot be read,
  such as ``Score: 7-8``.

What cannot be told apart is a bare line that a judge repeats without any verdict of its own.

Every function takes time that is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gcore_rewards.genrm.parser_config import plain

_FENCE = re.compile(r" {0,3}(?:```|~~~)")
_DECORATION = r" {0,3}(?:#{1,6} +)?[*_]*"  # a heading, bold or italic
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class _Line(NamedTuple):
    """One line of a text.

    text: what it says.
    quoted: whether it stands between code fences or quotation marks.
    """

    text: str
    quoted: bool


def read_labelled_line(text: str, label: str, value: Callable[[str], float | None]) -> float | None:
    """Returns the value of the lines ``label: value``; None unless there is one and all agree.

    The value may stand on the next line that is not empty. Bold, italic, a heading and a full stop
    are left out.

    value: reads what stands behind the label; None where that is no value.
    """
    labelled = re.compile(rf"{_DECORATION}{re.escape(label)}[*_]*\s*:(?P<rest>.*)", re.IGNORECASE)
    lines = _lines(text)
    verdicts: list[float | None] = []
    quoted: list[float | None] = []
    for number, line in enumerate(lines):
        match = labelled.match(line.text)
        if match is None:
            continue
        rest = _undecorated(match["rest"]) or _undecorated(_next_text(lines, number))
        score = value(rest)
        if not line.quoted:
            verdicts.append(score)
        elif score is not None:
            quoted.append(score)
    return _agreed(verdicts, quoted)


def read_choice_line(text: str, choices: Mapping[str, float]) -> float | None:
    """Returns the score of the lines that are a choice, or begin with one and a full stop.

    It returns None unless there is such a line and nothing contradicts it. A line contradicts it
    that begins with another choice, in whatever sentence, and so does a later sentence of the line
    that begins with another choice and a mark, as in ``Yes. No, wait.``

    choices: words in small letters, and the scores that they stand for.
    """
    words = "|".join(map(re.escape, sorted(choices, key=len, reverse=True)))  # "not good" first
    beginning = re.compile(rf"{_DECORATION}(?P<choice>{words})(?!\w)(?P<rest>.*)", re.IGNORECASE)
    verdicts: list[float | None] = []
    others: list[float | None] = []
    for line in _lines(text):
        first, *later = _SENTENCE_END.split(line.text)
        match = beginning.match(first)
        if match is None:
            continue
        is_verdict = match["rest"].strip(" \t*_") in ("", ".", "!") and not line.quoted
        (verdicts if is_verdict else others).append(choices.get(plain(match["choice"])))
        for sentence in later:
            match = beginning.match(sentence)
            if match is not None and not match["rest"].startswith(" "):
                others.append(choices.get(plain(match["choice"])))
    return _agreed(verdicts, others)


def _agreed(verdicts: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """Returns the value of all verdicts; None where there is none or anything differs from it."""
    return verdicts[0] if verdicts and len({*verdicts, *others}) == 1 else None


def _lines(text: str) -> list[_Line]:
    """Splits a text into lines, and says which are quoted.

    Only double quotation marks open a quotation: single ones are apostrophes too. A mark that is
    not closed after the line opens none: it may stand for inches.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    last_straight = text.rfind('"')
    last_closing = text.rfind("\u201d")
    lines = []
    is_fenced = False
    straight = depth = 0  # marks before the line; of curly ones, how many are open
    start = 0
    for line in text.split("\n"):
        is_fence = _FENCE.match(line) is not None
        in_quotation = (straight % 2 == 1 and last_straight >= start) or (
            depth > 0 and last_closing >= start
        )
        lines.append(_Line(line, is_fenced or is_fence or in_quotation))
        is_fenced ^= is_fence
        straight += line.count('"')
        depth += line.count("\u201c") - line.count("\u201d")
        start += len(line) + 1
    return lines


def _next_text(lines: Sequence[_Line], number: int) -> str:
    """Returns the first line after line ``number`` that is not empty; "" where there is none."""
    later = (lines[i].text for i in range(number + 1, len(lines)))
    return next((text for text in later if text.strip()), "")


def _undecorated(text: str) -> str:
    """Returns a value without bold, italic, angle brackets and a full stop around it."""
    bare = text.strip(" \t*_")
    if bare.endswith((".", "!")):
        bare = bare[:-1].rstrip("*_ \t")
    if bare.startswith("<") and bare.endswith(">"):
        bare = bare[1:-1].strip()
    return bare
