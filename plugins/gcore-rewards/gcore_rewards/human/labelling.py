"""Chooses which question of a reward a rater answers next, and takes the label."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from gcore_rewards.human.judgements import Label
from gcore_rewards.human.queue import Question, Questions, labels_path
from gcore_rewards.human.raters import Refusal, SaidByRaters
from gcore_rewards.human.tasks import Choice, Progress, Shown, seconds_of

_SKIP = Choice(value="skip", text="Skip", key="s")


class Labelling:
    """The task of labelling answers, for all raters of one page.

    The next question is the one that the fewest raters have answered or have open, and among those
    the oldest. A question that enough raters have answered is not shown to others, and no rater is
    asked twice.

    directory: of the queue.

    Raises ConfigError when another process writes its labels, DataError for a bad line in them.
    """

    template: ClassVar[str] = "label.html"
    title: ClassVar[str] = "Labels for a run"

    def __init__(self, directory: Path) -> None:
        self._questions = Questions(directory)
        self._questions.waiting()  # a bad line is told before the page opens
        self._said = SaidByRaters(
            labels_path(directory), Label, todo="end the other `g-core human label` first"
        )
        self._open: dict[str, str] = {}  # rater -> the question that the rater's page shows

    def close(self) -> None:
        self._said.journal.close()

    def next(self, rater: str) -> Shown | None:
        key = self._next_key(rater)
        if key is None:
            self._open.pop(rater, None)
            return None
        self._open[rater] = key
        question = self._questions.waiting()[key]
        return Shown(
            key=key,
            prompt=question.prompt,
            answers=(question.answer,),
            choices=(*_choices(question), _SKIP),
            question=question.question,
        )

    def answer(self, rater: str, form: Mapping[str, str]) -> None:
        """Takes a label: ``key``, ``choice`` and ``seconds`` of the page's form."""
        question = self._questions.waiting().get(form.get("key", ""))
        if question is None:
            raise Refusal(404, "there is no such question, or the run waits for it no longer.")
        choice = form.get("choice", "")
        if choice not in [each.value for each in (*_choices(question), _SKIP)]:
            raise Refusal(422, f"{choice!r} is no label.")
        if self._said.of(question.key, rater):
            raise Refusal(409, "you have labelled this answer before.")
        seconds = seconds_of(form)
        self._said.add(
            lambda number, now_s: Label(
                number=number,
                key=question.key,
                value=None if choice == "skip" else int(choice),
                rater=rater,
                seconds=seconds,
                time_unix_s=now_s,
            )
        )

    def last(self, rater: str) -> int:
        return self._said.last(rater)

    def undo(self, rater: str, number: int) -> None:
        self._said.undo(rater, number)

    def progress(self, rater: str) -> Progress:
        waiting = self._questions.waiting()
        own = sum(bool(self._said.of(key, rater)) for key in waiting)
        return Progress(
            own=own,
            own_of=own + sum(self._may_see(question, rater) for question in waiting.values()),
            made=sum(min(self._said.count(key), q.raters) for key, q in waiting.items()),
            made_of=sum(question.raters for question in waiting.values()),
        )

    def _next_key(self, rater: str) -> str | None:
        waiting = self._questions.waiting()
        again = self._said.again.get(rater)
        if again in waiting:
            return again
        # ``min`` takes the first of several, and the oldest question stands first.
        return min(
            (key for key, question in waiting.items() if self._may_see(question, rater)),
            key=lambda key: self._elsewhere(key, rater),
            default=None,
        )

    def _may_see(self, question: Question, rater: str) -> bool:
        if self._said.of(question.key, rater):
            return False
        return self._said.count(question.key) < question.raters

    def _elsewhere(self, key: str, rater: str) -> int:
        """Counts the other raters who have answered a question or have it open."""
        is_open = sum(shown == key for other, shown in self._open.items() if other != rater)
        return self._said.count(key) + is_open


def _choices(question: Question) -> tuple[Choice, ...]:
    if question.form == "yes_no":
        return (
            Choice(value="1", text="Yes", key="y"),
            Choice(value="0", text="No", key="n"),
        )
    ends = {question.lowest: " worst", question.highest: " best"}
    return tuple(
        # A key has one digit: 10 is pressed by 0, and numbers below 0 have a button alone.
        Choice(value=str(n), text=f"{n}{ends.get(n, '')}", key="0" if n == 10 else str(n))
        for n in range(question.lowest, question.highest + 1)
    )
