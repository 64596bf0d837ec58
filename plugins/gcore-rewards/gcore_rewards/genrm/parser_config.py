"""Settings under ``parser:`` of a generative reward, and the checks that they share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gcore_core.contract.errors import ConfigError
from gcore_rewards.genrm.patterns import Pattern


def require(holds: bool, where: str, what: str) -> None:
    """Raises ConfigError unless ``holds``."""
    if not holds:
        raise ConfigError(what, where=where)


def plain(name: str) -> str:
    """Returns a name as it is compared: without capitals, and without space around it."""
    return name.strip().casefold()


@dataclass(frozen=True, kw_only=True)
class ParserConfig:
    """How a score is read from an answer of the judge: by a line, a key or a pattern."""

    line: str = ""
    """Label of the line that holds the score, such as Score for ``Score: 7``. The line must hold
    nothing else. Lines that differ are no score.
    """
    key: str = ""
    """Key of the score in a JSON object in the answer. Objects that differ are no score."""
    pattern: str = ""
    """Regular expression with a group named score, as in ``Grade (?P<score>\\d+)$``. Its last match
    counts, even if it is a quotation.
    """
    choices: dict[str, float] = field(default_factory=dict)
    """Word -> score; capitals do not matter. Without line, key or pattern, a line must be one of
    the words, or begin with one and a full stop. Quote yes and no.
    """
    after: str = ""
    """Text at the end of the judge's reasoning, such as </think>. Only what stands after its first
    occurrence is read; an answer without it is no score.
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
        names = Pattern(self.pattern, "parser.pattern").names
        require(
            not self.pattern or "score" in names, "parser.pattern", "has no group (?P<score>...)."
        )
        for word, score in self.choices.items():
            require(bool(word.strip()), "parser.choices", "an empty word is no choice.")
            require(
                math.isfinite(score),
                "parser.choices",
                f"{word!r} stands for {score}, which is no score.",
            )
