"""Parses scores from what a judge wrote. What cannot be read is None, never a number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from gcore_rewards.genrm.json_objects import find_object
from gcore_rewards.genrm.parser_config import ParserConfig, plain
from gcore_rewards.genrm.patterns import Pattern
from gcore_rewards.genrm.verdict_lines import read_choice_line, read_labelled_line
from gcore_rewards.numbers import decimal_of

Reader = Callable[[str], float | None]
#: What stands between a score and the best one, as in "7/10" and "7 out of 10".
_OF = re.compile(r"/|out of", re.IGNORECASE)


def make_reader(parser: ParserConfig, ends: Sequence[float] = ()) -> Reader:
    """Returns a reader of the score in a text, found by line, key, pattern or choices.

    The reader raises SlowPattern when a pattern uses up its time.

    ends: of the scale. The larger one may stand behind a score on a line, as in ``Score: 7/10``.
    """
    choices = _by_plain_word(parser)
    if parser.line:
        value = _value_reader(choices, ends)
        return _behind(parser.after, lambda text: read_labelled_line(text, parser.line, value))
    if parser.key:
        key = plain(parser.key)
        return _behind(
            parser.after, lambda text: _number((find_object(text, [key]) or {}).get(key), choices)
        )
    if parser.pattern:
        pattern = Pattern(parser.pattern, "parser.pattern")
        return _behind(parser.after, lambda text: _number(_last(pattern, text), choices))
    return _behind(parser.after, lambda text: read_choice_line(text, choices))


def make_rubric_reader(
    parser: ParserConfig, names: Sequence[str]
) -> Callable[[str], list[float] | None]:
    """Returns a reader that finds the score of every criterion, in the order of ``names``.

    It returns None unless all are there, and raises SlowPattern like ``make_reader``'s. Without a
    pattern the criteria are keys of one JSON object; with one, the last score of each counts.
    """
    choices = _by_plain_word(parser)
    keys = [plain(name) for name in names]
    pattern = Pattern(parser.pattern, "parser.pattern") if parser.pattern else None

    def read(text: str) -> list[float] | None:
        values: Mapping[str, Any]
        if pattern is None:
            values = find_object(text, keys) or {}
        else:
            values = {
                plain(match["name"]): match["score"]
                for match in pattern.matches(text)
                if match["name"] and match["score"]
            }
        scores = [score for key in keys if (score := _number(values.get(key), choices)) is not None]
        return scores if len(scores) == len(keys) else None

    return _behind(parser.after, read)


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


def _behind(mark: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a reader of what stands behind the first ``mark``; of all where there is no mark.

    It is the first one because a later one may be quoted: what is read too much can contradict the
    verdict, what is left out cannot.
    """
    if not mark:
        return read

    def read_rest(text: str) -> Any:
        _, separator, rest = text.partition(mark)
        return read(rest) if separator else None

    return read_rest


def _by_plain_word(parser: ParserConfig) -> dict[str, float]:
    return {plain(word): score for word, score in parser.choices.items()}


def _last(pattern: Pattern, text: str) -> str | None:
    matches = pattern.matches(text)
    return matches[-1]["score"] if matches else None


def _value_reader(choices: Mapping[str, float], ends: Sequence[float]) -> Reader:
    """Returns a reader of what stands behind a label: a choice, or a number such as 7 or 7/10."""

    def read(text: str) -> float | None:
        if choices:
            return _number(text, choices)
        score, *best = _OF.split(text, maxsplit=1)
        is_of_scale = not best or (bool(ends) and _number(best[0], {}) == max(ends))
        return _number(score, {}) if is_of_scale else None

    return read


def _number(value: Any, choices: Mapping[str, float]) -> float | None:
    """Returns the finite number that a value stands for; None where it stands for none.

    Where there are choices, a value must be one of their words. Else it must be a number or the
    text of one, written with digits, a decimal point and a sign alone.
    """
    if choices:
        return choices.get(plain(value)) if isinstance(value, str) else None
    if isinstance(value, str):
        value = decimal_of(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
