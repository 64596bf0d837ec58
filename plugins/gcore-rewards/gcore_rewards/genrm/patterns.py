"""Searches texts for a user's regular expression, within a limit of time.

Judges are asked on a scorer's event loop. Python's own ``re`` cannot be stopped: with a pattern
that backtracks, one text would hold the loop for ever. The library ``regex`` reads the same
patterns and takes a limit.
"""

from __future__ import annotations

import regex

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import REWARD_TIMEOUT
from gcore_core.contract.scorer import REASON_CHARACTERS, Score

#: Seconds of CPU time that a pattern may search one text. A pattern that does not backtrack needs
#: some milliseconds for the longest of texts.
LIMIT_S = 0.1


class SlowPattern(Exception):
    """A pattern has used up its time on a text; the message is the reason that a record gets."""


def compiled(pattern: str, where: str) -> regex.Pattern[str]:
    """Compiles a regular expression. Raises ConfigError where it is none."""
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(
            f"{pattern!r} is not a regular expression: {error}.", where=where
        ) from error


class Pattern:
    """A user's regular expression, whose searches are bounded.

    where: the setting that holds it.
    groups: the number of its groups.
    names: the names of its groups.
    """

    def __init__(self, pattern: str, where: str) -> None:
        self._pattern = compiled(pattern, where)
        self._where = where
        self.groups: int = self._pattern.groups
        self.names = set(self._pattern.groupindex)

    def matches(self, text: str) -> list[regex.Match[str]]:
        """Returns all matches, in order. Raises SlowPattern when that takes longer than LIMIT_S."""
        try:
            return list(self._pattern.finditer(text, timeout=LIMIT_S))
        except TimeoutError:
            pattern = self._pattern.pattern
            raise SlowPattern(
                f"{self._where} took longer than {LIMIT_S:g} s: {pattern!r}"
            ) from None


def timed_out(error: SlowPattern) -> Score:
    """Makes the score of a record on which a pattern has spent its time."""
    return Score(value=None, status=REWARD_TIMEOUT, reason=str(error)[:REASON_CHARACTERS])
