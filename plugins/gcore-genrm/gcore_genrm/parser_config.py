"""Settings under ``parser:`` of a generative reward, and the checks that they share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from gcore_core.contract.errors import ConfigError


def require(holds: bool, where: str, what: str) -> None:
    """Raises ConfigError unless ``holds``."""
    if not holds:
        raise ConfigError(what, where=where)


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compiles a regular expression. Raises ConfigError where it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} is not a regular expression: {error}.", where=where
        ) from error


def plain(name: str) -> str:
    """Returns a name as it is compared: without capitals, and without space around it."""
    return name.strip().casefold()


@dataclass(frozen=True, kw_only=True)
class ParserConfig:
    """How the score is found in what the judge wrote. Give a line, a key or a pattern."""

    line: str = ""
    """Label of the line that holds the score: Score for ``Score: 7``. The line may hold nothing
    else, and lines that differ are no score.
    """
    key: str = ""
    """Instead: the key of a JSON object in the text. Objects that differ are no score."""
    pattern: str = ""
    """Instead: a regular expression with a group named score, as in ``Grade (?P<score>\\d+)$``. Its
    last match counts, whoever is quoted there.
    """
    choices: dict[str, float] = field(default_factory=dict)
    """Word -> score, capitals or not. Alone: a line must begin with one of the words. Quote yes and
    no.
    """
    after: str = ""
    """Read only what stands after the first occurrence of this text, such as </think>; an answer
    without it is no score.
    """

    def __post_init__(self) -> None:
        require(not (self.pattern and self.key), "parser", "takes a pattern or a key, not both.")
        require(
            not self.line or not (self.pattern or self.key),
            "parser",
            "takes a line, a key or a pattern, not two of them.",
        )
        require(
            self.line == self.line.strip() and "\n" not in self.line,
            "parser.line",
            f"{self.line!r} is not the label of a line.",
        )
        groups = compiled(self.pattern, "parser.pattern").groupindex
        require(
            not self.pattern or "score" in groups, "parser.pattern", "has no group (?P<score>...)."
        )
        for word, score in self.choices.items():
            require(bool(word.strip()), "parser.choices", "an empty word is no choice.")
            require(
                math.isfinite(score),
                "parser.choices",
                f"{word!r} stands for {score}, which is no score.",
            )
