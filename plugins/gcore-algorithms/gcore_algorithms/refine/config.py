"""What can be set under ``sampling.config``."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Literal

from gcore_core.contract.errors import ConfigError

#: What a template may have in braces.
WORDS = frozenset({"prompt", "answer", "critique", "reward"})


@dataclass(frozen=True, kw_only=True)
class CritiqueConfig:
    """Settings of refinement from a critique."""

    first: int = 4
    """Records of a group that answer the row's own prompt, at least 2; the others are made from
    them. At least 2 must be left, because both parts have a baseline of their own.
    """
    draft: Literal["best", "worst", "each"] = "best"
    """Which of the first answers the others are made from. best: the one of the highest reward.
    worst: of the lowest. each: one after the other, the best first.
    """
    template: str = (
        "{prompt}\n\nAn earlier answer:\n{answer}\n\n{critique}\n\nAnswer again, better:\n"
    )
    """The prompt of a refined answer, of a row with a text. It may have {prompt}, {answer},
    {critique} and {reward} in it; a brace is written twice.
    """
    turn: str = "{critique}\nAnswer again, better."
    """What the user says after the earlier answer, of a row with turns; {critique}, {reward}."""
    critique: str = "That answer was worth {reward}."
    """The critique of an answer of which no reward has said anything; {reward}."""

    def __post_init__(self) -> None:
        if self.first < 2:
            raise ConfigError(
                f"{self.first} is less than 2",
                where="sampling.config.first",
                why="the first answers are compared with each other, so one alone teaches nothing",
                todo="set first to 2 or more, such as half of advantage.config.group_size",
            )
        self._check("template", WORDS)
        self._check("turn", frozenset({"critique", "reward"}))
        self._check("critique", frozenset({"reward"}))

    def _check(self, name: str, words: frozenset[str]) -> None:
        """Raises ConfigError for a template with other words in braces than ``words``."""
        where = f"sampling.config.{name}"
        known = ", ".join(f"{{{word}}}" for word in sorted(words))
        try:
            parts = list(string.Formatter().parse(getattr(self, name)))
        except ValueError as error:
            raise ConfigError(
                f"it cannot be read: {error}", where=where, todo="write a brace twice: {{"
            ) from error
        for _, word, form, conversion in parts:
            if word is not None and (word not in words or form or conversion):
                raise ConfigError(
                    f"nothing is known of {{{word}}}",
                    where=where,
                    why=f"it may have {known}",
                    todo="take one of these, or write the braces twice",
                )
