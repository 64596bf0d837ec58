"""Searches completions for a user's regular expression, within a limit of time.

Python's own ``re`` cannot be stopped: with a pattern that backtracks, one completion holds the
interpreter for ever. The library ``regex`` reads the same patterns and takes a limit.
"""

from __future__ import annotations

import regex

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import REWARD_TIMEOUT
from gcore_core.contract.scorer import REASON_CHARACTERS, Score


class SlowPattern(Exception):
    """A pattern has used up its time on a text; the message is the reason that a record gets."""


def compiled(pattern: str) -> regex.Pattern[str]:
    """Compiles a regular expression. Raises ConfigError where it is none."""
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(
            f"{pattern!r} is not a regular expression: {error}", where="pattern"
        ) from error


class Pattern:
    """Finds the part of a completion that counts: the last match, or all where there is no pattern.

    Of a match, the first group counts where the pattern has groups.
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
        return matches[-1].group(1 if pattern.groups else 0) if matches else None


def timed_out(error: SlowPattern) -> Score:
    """Makes the score of a completion that a pattern has spent its time on."""
    return Score(value=None, status=REWARD_TIMEOUT, reason=str(error)[:REASON_CHARACTERS])
