"""Tasks of reasoning-gym: a question, an answer, and a score of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gcore_environments import Observation, Reply

try:
    import reasoning_gym
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the distribution reasoning-gym is missing ({error})") from error


class Reasoning:
    """Asks the question of a task that has the row's ``number``.

    The reward ``right`` is what the task's ``score_answer`` gives, 0 to 1. With ``levels`` an
    answer that is worth 1 is followed by the question of the next level, so an episode's ``right``
    is how far it came.

    task: its name in reasoning-gym; a row's field ``task`` goes before it.
    size: how many questions there are.
    questions_seed: of the questions.
    options: what the task is made with, such as how hard it is.
    levels: what the task is made with on each level, besides the options; none: there is one.
    begin, end: what stands before and behind the answer; the last such place is read. Without them
        the whole reply is the answer.
    """

    def __init__(
        self,
        task: str,
        size: int = 4096,
        questions_seed: int = 0,
        options: Mapping[str, Any] | None = None,
        levels: Sequence[Mapping[str, Any]] = (),
        begin: str = "",
        end: str = "",
    ) -> None:
        self._task = task
        self._size = size
        self._seed = questions_seed
        self._levels = [{**(options or {}), **level} for level in levels or [{}]]
        self._level = 0
        self._begin, self._end = begin, end

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._task = str(row.get("task") or self._task)
        if "number" not in row:
            raise KeyError(
                "a row has no field number, which says what question it asks; take "
                "data.use: environments/numbers, or write the numbers into the rows"
            )
        self._number = int(row["number"]) % self._size
        told = [m for m in row.get("messages") or [] if m.get("role") == "system"]
        return Observation(messages=[*told, self._ask()])

    def _ask(self) -> dict[str, Any]:
        options = tuple(sorted(self._levels[self._level].items()))
        self._questions = _questions(self._task, self._size, self._seed, options)
        self._entry = self._questions[self._number]
        return {"role": "user", "content": self._entry["question"]}

    async def step(self, reply: Reply) -> Observation:
        answer = self._read(reply.text)
        score = float(self._questions.score_answer(answer=answer, entry=self._entry))
        self._level += 1
        if score < 1.0 or self._level == len(self._levels):
            return Observation(rewards={"right": score}, done=True)
        return Observation(messages=[self._ask()], rewards={"right": score})

    def _read(self, text: str) -> str | None:
        """Returns the answer in a text; None where its marks are missing."""
        if self._begin:
            _, found, text = text.rpartition(self._begin)
            if not found:
                return None
        return (text.partition(self._end)[0] if self._end else text).strip()

    async def close(self) -> None:
        pass


class Rows(Reasoning):
    """Tells a question together with its answer, for a data set; nobody is asked."""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        await super().reset(row, seed)
        # what JSON cannot hold is told as text
        metadata = json.loads(json.dumps(self._entry["metadata"], default=str, skipkeys=True))
        told = {"role": "user", "content": self._entry["question"]}
        told |= {"answer": self._entry["answer"], "metadata": metadata}
        return Observation(messages=[told], done=True)


@lru_cache(maxsize=16)
def _questions(task: str, size: int, seed: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns the questions of a task; the library makes each when it is asked for."""
    return reasoning_gym.create_dataset(task, size=size, seed=seed, **dict(options))
