"""Tasks of reasoning-gym: a question, an answer, and a score of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gcore_environments import Observation, Reply

try:
    import reasoning_gym
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"the distribution reasoning-gym is missing ({error})") from error


class Reasoning:
    """Asks one question of a task: that of the row's ``number``, or one by the sample's prompt.

    The reward ``right`` is what the task's ``score_answer`` gives, 0 to 1.

    task: its name in reasoning-gym; a row's field ``task`` goes before it.
    size: how many questions there are.
    questions_seed: of the questions.
    options: what the task is made with, such as how hard it is.
    begin, end: what stands before and behind the answer; the last such place is read. Without them
        the whole reply is the answer.
    """

    def __init__(
        self,
        task: str,
        size: int = 4096,
        questions_seed: int = 0,
        options: Mapping[str, Any] | None = None,
        begin: str = "",
        end: str = "",
    ) -> None:
        self._task = task
        self._size = size
        self._seed = questions_seed
        self._options = tuple(sorted((options or {}).items()))
        self._begin, self._end = begin, end

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        task = str(row.get("task") or self._task)
        self._questions = _questions(task, self._size, self._seed, self._options)
        if "number" not in row:
            raise KeyError(
                "a row has no field number, which says what question it asks; take "
                "data.use: environments/numbers, or write the numbers into the rows"
            )
        self._entry = self._questions[int(row["number"]) % self._size]
        told = [m for m in row.get("messages") or [] if m.get("role") == "system"]
        return Observation(messages=[*told, {"role": "user", "content": self._entry["question"]}])

    async def step(self, reply: Reply) -> Observation:
        answer = self._read(reply.text)
        score = self._questions.score_answer(answer=answer, entry=self._entry)
        return Observation(rewards={"right": float(score)}, done=True)

    def _read(self, text: str) -> str | None:
        """Returns the answer in a text; None where its marks are missing."""
        if self._begin:
            _, found, text = text.rpartition(self._begin)
            if not found:
                return None
        return (text.partition(self._end)[0] if self._end else text).strip()

    async def close(self) -> None:
        pass


@lru_cache(maxsize=16)
def _questions(task: str, size: int, seed: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns the questions of a task; the library makes each when it is asked for."""
    return reasoning_gym.create_dataset(task, size=size, seed=seed, **dict(options))
