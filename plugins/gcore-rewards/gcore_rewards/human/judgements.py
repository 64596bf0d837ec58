"""Defines the lines that a page writes, and reads them again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from gcore_core.contract.errors import DataError
from gcore_rewards.human.journal import Tail

Verdict = Literal["better", "tie", "bad", "skip"]


class Judgement(msgspec.Struct, tag="judgement", tag_field="what", kw_only=True, frozen=True):
    """Holds what one rater said of one pair.

    number: counts the lines of the file that can be undone, from 1.
    pair: digest of prompt and both answers.
    prompt: text or chat messages.
    verdict: "better": chosen is; "tie": both are equally good; "bad": both are; "skip": nothing.
    chosen, rejected: the answers; None unless the verdict is "better".
    tie: whether the verdict is "tie" or "bad".
    answers: both, in the order that was shown: left, right.
    origins: where they come from, in the same order.
    rater: name of the person.
    seconds: from when the page was shown until the answer.
    time_unix_s: when it was written.
    """

    number: int
    pair: str
    prompt: str | list[dict[str, Any]]
    verdict: Verdict
    chosen: str | None
    rejected: str | None
    tie: bool
    answers: tuple[str, str]
    origins: tuple[str, str]
    rater: str
    seconds: float
    time_unix_s: float

    @property
    def key(self) -> str:
        """What was judged."""
        return self.pair

    @property
    def category(self) -> str:
        """What was said, in words that do not depend on the order that was shown."""
        if self.verdict != "better":
            return self.verdict
        return "first" if self.chosen == min(self.answers) else "second"


class Label(msgspec.Struct, tag="label", tag_field="what", kw_only=True, frozen=True):
    """Holds what one rater answered to a question of a reward.

    number: as in ``Judgement``.
    key: names the question, see ``queue.Question``.
    value: a number of the scale, or 1 for yes and 0 for no; None: the rater skipped it.
    rater, seconds, time_unix_s: as in ``Judgement``.
    """

    number: int
    key: str
    value: int | None
    rater: str
    seconds: float
    time_unix_s: float

    @property
    def category(self) -> str:
        return "skip" if self.value is None else str(self.value)


class Undone(msgspec.Struct, tag="undone", tag_field="what", kw_only=True, frozen=True):
    """Takes an earlier line back.

    number: that of the line.
    rater: who said it, and took it back.
    """

    number: int
    rater: str
    time_unix_s: float


Line = Judgement | Label | Undone
Said = TypeVar("Said", Judgement, Label)


def read_lines(path: Path) -> list[Judgement | Label]:
    """Returns the judgements or labels of a file, less those that were taken back.

    Raises DataError when there is no such file, and for a line that is none.
    """
    if not path.is_file():
        raise DataError(
            "there is no such file.",
            where=str(path),
            todo="give a file that `g-core human rate` or `g-core human label` has written",
        )
    return standing(Tail[Line](path, Line).new())


def standing(lines: Iterable[Line]) -> list[Judgement | Label]:
    """Returns what was said and not taken back, in order."""
    by_number: dict[int, Judgement | Label] = {}
    for line in lines:
        if isinstance(line, Undone):
            by_number.pop(line.number, None)
        else:
            by_number[line.number] = line
    return list(by_number.values())
