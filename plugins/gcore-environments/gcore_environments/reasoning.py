"""Questions of reasoning-gym as a data set, and the scores of their answers as a reward.

Both ask the adapter of the environment, in a process of its own, so the interpreter that has
reasoning-gym needs nothing of G-Core, and scores are the same as in an episode.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.records import FINISHED, Prompt
from gcore_core.contract.scorer import Score, ScoredRecord, failure
from gcore_environments.adapter_settings import (
    AskedConfig,
    ReasoningRewardConfig,
    ReasoningRowsConfig,
)
from gcore_environments.hosts import Hosts, HostSettings

_ADAPTER = "gcore_environments.adapters.reasoning"
#: Longest that the package may take to be imported, or for a question or a score.
PATIENCE_S = 120.0


class Questions:
    """Asks a class of the adapter, one episode at a time.

    where: of the settings, for errors.
    """

    def __init__(self, name: str, config: AskedConfig, where: str, **words: Any) -> None:
        self._where = where
        self._python = config.python
        self._episodes = 0
        settings = HostSettings(
            environment=f"{_ADAPTER}:{name}",
            config={**config.words(), **words},
            python=config.python,
            turn_s=PATIENCE_S,
        )
        try:
            self._hosts = Hosts(settings)
        except OSError as error:
            raise self._problem(str(error)) from error
        weakref.finalize(self, self._hosts.close)

    def play(
        self, row: Mapping[str, Any], text: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what a question's episode says at first, and after the answer ``text``.

        Raises DataError where the package is missing, or cannot ask the question. Where it cannot
        score an answer, what is said has an ``error``.
        """
        key = [self._episodes, 0]
        self._episodes += 1
        host = self._hosts.of((0, 0))
        host.send(op="open", id=key, seed=0, row=dict(row), endpoint={})
        asked = said = self._next()
        if "error" in asked:
            raise self._problem(str(asked["error"]))
        if text is not None:
            host.send(op="step", id=key, turn=1, text=text, status=FINISHED)
            said = self._next()
        host.send(op="close", id=key)
        return asked, said

    def _next(self) -> dict[str, Any]:
        while True:
            try:
                _, said = self._hosts.replies.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise self._problem(f"it said nothing for {PATIENCE_S:g} s") from None
            if "lost" in said:
                raise self._problem(str(said.get("error") or "its process has ended"))
            if "ready" not in said:
                return said

    def _problem(self, why: str) -> DataError:
        return DataError(
            "reasoning-gym cannot be asked.",
            where=self._where,
            why=why,
            todo=(
                "Look at the task's name and its options. Where the package is missing, install "
                f"reasoning-gym for {self._python or 'the interpreter of this process'}, or name "
                "one that has it as python."
            ),
        )


class ReasoningRows:
    """Gives questions as rows, with the fields ``number``, ``task``, ``answer``, ``metadata``."""

    def __init__(self, config: ReasoningRowsConfig) -> None:
        self._config = config
        self._questions = Questions("Rows", config, "data.config")

    def __len__(self) -> int:
        return self._config.rows or self._config.size - self._config.first

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self):
            raise IndexError(f"there are rows 0 to {len(self) - 1}, and {row} was asked for")
        number = self._config.first + row
        asked, _ = self._questions.play({"number": number})
        (told,) = asked["messages"]
        question = told["content"]
        fields = {"answer": told["answer"], "metadata": told["metadata"]}
        fields |= {"number": number, "task": self._config.task}
        if self._config.chat:
            messages = [{"role": "user", "content": question}]
            return Prompt(row=row, messages=messages, fields=fields)
        return Prompt(row=row, text=question, fields=fields)


class ReasoningReward:
    """Scores a record by the task's ``score_answer``, for the question of the row's ``number``.

    A row of the data set that asks something else fails: the two have other settings.
    """

    def __init__(self, config: ReasoningRewardConfig, context: WorkerContext) -> None:
        words = {"begin": config.begin, "end": config.end}
        self._questions = Questions("Reasoning", config, "rewards", **words)

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        return [self._score(record) for record in records]

    def _score(self, record: ScoredRecord) -> Score:
        fields = record.prompt.fields
        if "number" not in fields:
            return failure(
                "its row has no field number, which says what was asked; take "
                "data.use: environments/reasoning"
            )
        row: dict[str, Any] = {name: fields[name] for name in ("number", "task") if name in fields}
        asked, said = self._questions.play(row, record.text)
        question = asked["messages"][-1]["content"]
        if "answer" in fields and question not in _text_of(record.prompt):
            return failure(
                f"its row asks something else than question {row['number']} of the reward; give "
                "the reward the data set's size, questions_seed and options"
            )
        if "error" in said:
            return failure(f"the answer cannot be scored: {said['error']}")
        return Score(value=float(said["rewards"]["right"]))


def _text_of(prompt: Prompt) -> str:
    """Returns all that a row says."""
    told = [str(message.get("content") or "") for message in prompt.messages or ()]
    return "\n".join([prompt.text or "", *told])
