"""Keeps the questions of a reward and their labels on disk, for a run and a page to meet at.

``questions.jsonl`` is written by scorers, ``labels.jsonl`` by the page. Both are only appended to,
so either side may end and start again at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.runs import read_config
from gcore_rewards.human.answers import digest_of
from gcore_rewards.human.checks import queues
from gcore_rewards.human.config import HumanConfig
from gcore_rewards.human.journal import Tail, append_shared
from gcore_rewards.human.judgements import Label, Line, Undone


class Question(msgspec.Struct, tag="question", tag_field="what", kw_only=True, frozen=True):
    """Asks people about one answer.

    key: names question, prompt and answer by their content, so an equal one is the same question.
    prompt: text or chat messages.
    answer: what the policy wrote.
    question, form, lowest, highest, raters: as in ``HumanConfig``.
    asker: names the scorer worker that asked.
    time_unix_s: when it was asked.
    """

    key: str
    prompt: str | list[dict[str, Any]]
    answer: str
    question: str
    form: str
    lowest: int
    highest: int
    raters: int
    asker: str
    time_unix_s: float


class Withdrawn(msgspec.Struct, tag="withdrawn", tag_field="what", kw_only=True, frozen=True):
    """Says that nobody waits for a question's labels any more."""

    key: str
    time_unix_s: float


def key_of(config: HumanConfig, prompt: str | list[dict[str, Any]], answer: str) -> str:
    """Names what is asked: the same for every run that asks the same about the same answer."""
    scale = (config.lowest, config.highest) if config.form == "scale" else ()
    return digest_of(config.question, config.form, scale, prompt, answer)


def queues_of(run: Path) -> list[Path]:
    """Returns the directories in which the rewards of a run ask people; none for another directory.

    The run need not have asked yet.
    """
    try:
        config = read_config(run)
    except (OSError, ConfigError):
        return []
    return queues(config, run)


def questions_path(directory: Path) -> Path:
    """Returns the file of questions."""
    return directory / "questions.jsonl"


def labels_path(directory: Path) -> Path:
    """Returns the file of labels."""
    return directory / "labels.jsonl"


class Questions:
    """The questions that wait for labels.

    directory: of the queue.
    """

    def __init__(self, directory: Path) -> None:
        self._path = questions_path(directory)
        self._tail = Tail[Question | Withdrawn](self._path, Question | Withdrawn)
        self._waiting: dict[str, Question] = {}

    def waiting(self) -> dict[str, Question]:
        """Returns key -> question, the oldest first, as of now.

        Raises DataError for a line that cannot be read.
        """
        for line in self._tail.new():
            if isinstance(line, Withdrawn):
                self._waiting.pop(line.key, None)
            else:
                asked = self._waiting.get(line.key)
                # Two runs may ask the same of different numbers of people.
                if asked is None or asked.raters < line.raters:
                    self._waiting[line.key] = line
        return self._waiting

    def append(self, lines: Iterable[Question | Withdrawn]) -> None:
        """Writes lines; returns when they are on the disk."""
        append_shared(self._path, lines)


class Labels:
    """The labels that were given.

    directory: of the queue.
    """

    def __init__(self, directory: Path) -> None:
        self._tail = Tail[Line](labels_path(directory), Line)
        self._by_number: dict[int, Label] = {}
        self._by_key: dict[str, dict[str, int]] = {}

    def read(self) -> None:
        """Takes in what was written since it was last called.

        Raises DataError for a line that cannot be read.
        """
        for line in self._tail.new():
            if isinstance(line, Undone):
                label = self._by_number.pop(line.number, None)
                if label is not None:
                    self._by_key.get(label.key, {}).pop(label.rater, None)
            elif isinstance(line, Label):
                self._by_number[line.number] = line
                if line.value is not None:
                    self._by_key.setdefault(line.key, {})[line.rater] = line.value

    def of(self, key: str) -> dict[str, int]:
        """Returns rater -> label of one question; those who skipped it are left out."""
        return self._by_key.get(key, {})
