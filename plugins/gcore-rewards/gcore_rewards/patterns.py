"""Searches completions for a user's regular expression, within a limit of time.

Python's own ``re`` cannot be stopped: with a pattern that backtracks, one completion holds the
interpreter for ever. The library ``regex`` reads the same patterns and takes a limit.
"""

from __future__ import annotations

import regex

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import REWARD_TIMEOUT
from gcore_core.contract.scorer import REASON_CHARACTERS, Score

#: Of several groups, the one of this name counts. It may stand in each of several alternatives.
_ANSWER = "answer"


class SlowPattern(Exception):
    """A pattern has used up its time on a text; the message is the reason that a record gets."""


def compiled(pattern: str) -> regex.Pattern[str]:
    """Compiles a regular expression.

    Raises ConfigError where it is none, and where several groups leave open which one counts.
    """
    try:
        made = regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(
            f"{pattern!r} is not a regular expression: {error}", where="pattern"
        ) from error
    if made.groups > 1 and _ANSWER not in made.groupindex:
        raise ConfigError(
            f"{pattern!r} has {made.groups} groups, and none is named {_ANSWER}.",
            where="pattern",
            todo=f"write (?P<{_ANSWER}>...) for the one that counts, or (?:...) for the others",
        )
    return made


class Pattern:
    """Finds the part of a completion that counts: the last match, or all where there is no pattern.

    Of a match, the group ``answer`` counts, or the only one, where the pattern has groups. A match
    in which it took no part is none.
    """

    def __init__(self, pattern: str | None, limit_s: float) -> None:
        self._pattern = compiled(pattern) if pattern else None
        self._limit_s = limit_s

    def part(self, text: str) -> str | None:
        """Returns the part of the text that counts; None where nothing matches.

        Raises SlowPattern when the search takes longer than the limit.
        """
        pattern = self._pattern
        if pattern is None:
            return text
        try:
            matches = list(pattern.finditer(text, timeout=self._limit_s))
        except TimeoutError:
            reason = f"the pattern took longer than {self._limit_s:g} s: {pattern.pattern!r}"
            raise SlowPattern(reason) from None
        group = _ANSWER if _ANSWER in pattern.groupindex else min(pattern.groups, 1)
        parts = [match[group] for match in matches if match[group] is not None]
        return parts[-1] if parts else None


def timed_out(error: SlowPattern) -> Score:
    """Makes the score of a completion that a pattern has spent its time on."""
    return Score(value=None, status=REWARD_TIMEOUT, reason=str(error)[:REASON_CHARACTERS])
