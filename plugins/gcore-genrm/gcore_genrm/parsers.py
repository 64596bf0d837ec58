"""Parses scores from what a judge wrote. What cannot be read is None, never a number."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore_genrm.config import ParserConfig

Reader = Callable[[str], float | None]


def make_reader(parser: ParserConfig) -> Reader:
    """Returns a reader of the last score in a text, found by pattern, key or choices."""
    choices = {word.strip().casefold(): score for word, score in parser.choices.items()}
    if parser.key:
        return lambda text: _number(
            _last_object(text, [parser.key]).get(_plain(parser.key)), choices
        )
    if parser.pattern:
        pattern = re.compile(parser.pattern)
    else:  # longest first: "not good" before "good"
        words = "|".join(map(re.escape, sorted(choices, key=len, reverse=True)))
        pattern = re.compile(rf"(?<!\w)(?P<score>{words})(?!\w)", re.IGNORECASE)
    return lambda text: _number(_last(pattern, text), choices)


def make_rubric_reader(
    parser: ParserConfig, names: Sequence[str]
) -> Callable[[str], list[float] | None]:
    """Returns a reader that finds the last score of every criterion, in the order of ``names``.

    It returns None unless all are there. Without a pattern the criteria are keys of one JSON
    object.
    """
    choices = {word.strip().casefold(): score for word, score in parser.choices.items()}
    pattern = re.compile(parser.pattern) if parser.pattern else None

    def read(text: str) -> list[float] | None:
        if pattern is None:
            told = _last_object(text, names)
        else:
            told = {
                _plain(m["name"]): m["score"]
                for m in pattern.finditer(text)
                if m["name"] and m["score"]
            }
        scores = [
            score
            for name in names
            if (score := _number(told.get(_plain(name)), choices)) is not None
        ]
        return scores if len(scores) == len(names) else None

    return read


def on_scale(score: float, ends: Sequence[float], *, clip: bool) -> float | None:
    """Returns ``score`` on a scale whose ends, the worst and the best, become 0 and 1.

    It returns None when the score lies outside and is not clipped, and the score itself where
    there are no ends.
    """
    if not ends:
        return score
    worst, best = ends
    share = (score - worst) / (best - worst)
    if not 0 <= share <= 1 and not clip:
        return None
    return min(1.0, max(0.0, share))


def _plain(name: str) -> str:
    return name.strip().casefold()


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = None
    for match in pattern.finditer(text):
        found = match["score"]
    return found


def _number(value: Any, choices: Mapping[str, float]) -> float | None:
    """Returns the finite number that a value stands for; None where it stands for none.

    Where there are choices, a value must be one of their words. Else it must be a number or the
    text of one.
    """
    if choices:
        return choices.get(_plain(value)) if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _last_object(text: str, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the last JSON object in the text that has all the keys; empty where there is none.

    Capitals in keys do not matter; the object's keys come back in small letters.
    """
    # Every brace is tried as the beginning of an object, from the last one backwards.
    wanted = {_plain(key) for key in keys}
    decoder = json.JSONDecoder()
    for start in range(len(text) - 1, -1, -1):
        if text[start] != "{":
            continue
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(found, dict)
            and wanted <= (by_name := {_plain(key): value for key, value in found.items()}).keys()
        ):
            return by_name
    return {}
