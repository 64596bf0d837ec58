"""Tasks of reasoning-gym, next to the library by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gcore_environments.adapter_settings import ReasoningRewardConfig, ReasoningRowsConfig
from gcore_environments.reasoning import ReasoningReward, ReasoningRows

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord

#: Prints the questions and the scores of what was answered.
PLAIN = """
import json, sys, reasoning_gym
task, options, said = json.loads(sys.argv[1])
data = reasoning_gym.create_dataset(task, size=64, seed=3, **options)
rows = [data[n] for n in range(20)]
scores = [float(data.score_answer(answer=text, entry=row)) for text, row in zip(said, rows)]
print(json.dumps([[[row["question"], row["answer"]] for row in rows], scores]))
"""


@pytest.mark.parametrize(
    ("task", "options"),
    [("chain_sum", {}), ("chain_sum", {"max_digits": 2}), ("letter_counting", {}), ("gcd", {})],
)
def test_twenty_tasks_have_the_librarys_questions_and_scores(
    player: Any, task: str, options: dict[str, Any]
) -> None:
    rows, _ = player.plain(PLAIN, task, options, [""] * 20)
    said = [answer if n % 2 else f"perhaps {answer}" for n, (_, answer) in enumerate(rows)]
    _, scores = player.plain(PLAIN, task, options, said)
    for n in range(20):
        seen = player.play(
            "reasoning:Reasoning",
            lambda _, n=n: {"text": f" {said[n]}\n"},
            row={"number": n},
            seed=n + 100,
            task=task,
            size=64,
            questions_seed=3,
            options=options,
        )
        assert seen[0]["messages"] == [{"role": "user", "content": rows[n][0]}]
        assert seen[1]["rewards"] == {"right": scores[n]} and seen[1]["done"]
    assert min(scores) < max(scores) == 1.0


#: Prints whole questions, and the score of each answer that is said to each.
ENTRIES = """
import json, sys, reasoning_gym
found = {}
for task in json.loads(sys.argv[1]):
    data = reasoning_gym.create_dataset(task, size=8, seed=5)
    rows = [data[n] for n in range(2, 5)]
    said = [[row["answer"], f"perhaps {row['answer']}", rows[0]["answer"], "7", ""] for row in rows]
    scores = [[float(data.score_answer(answer=a, entry=row)) for a in answers]
              for row, answers in zip(rows, said)]
    found[task] = [rows, said, scores]
print(json.dumps(found, default=str, skipkeys=True))
"""
TASKS = (
    "advanced_geometry",
    "basic_arithmetic",
    "bitwise_arithmetic",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "count_primes",
    "countdown",
    "decimal_arithmetic",
    "family_relationships",
    "gcd",
    "knights_knaves",
    "lcm",
    "leg_counting",
    "letter_counting",
    "maze",
    "number_sequence",
    "spell_backward",
    "syllogism",
    "word_sorting",
)


def test_as_data_set_and_reward_twenty_tasks_have_the_librarys_rows_and_scores(player: Any) -> None:
    """A row says of itself which task it is of, so one reward scores them all."""
    assert len(TASKS) == 20
    where = {"size": 8, "questions_seed": 5, "python": str(player.python)}
    reward = ReasoningReward(
        ReasoningRewardConfig(task="gcd", **where), WorkerContext(role="reward")
    )
    library = player.plain(ENTRIES, *TASKS)
    for task, (_, said, scores) in library.items():
        for n in range(3):
            prompt = Prompt(row=n, text="?", fields={"number": 2 + n, "task": task})
            found = reward.score([_record(prompt, text) for text in said[n]])
            assert [score.value for score in found] == scores[n], task
            assert scores[n][0] == 1.0, task
    for task in ("chain_sum", "knights_knaves"):
        rows = ReasoningRows(ReasoningRowsConfig(task=task, **where, first=2, rows=3))
        assert len(rows) == 3
        for n, entry in enumerate(library[task][0]):
            prompt = rows[n]
            assert prompt.messages == [{"role": "user", "content": entry["question"]}]
            assert prompt.fields["answer"] == entry["answer"]
            assert prompt.fields["metadata"] == entry["metadata"]
            assert prompt.fields["number"] == 2 + n and prompt.fields["task"] == task


def test_a_row_without_a_number_fails_and_a_task_that_there_is_not_is_named(player: Any) -> None:
    config = ReasoningRewardConfig(task="gdc", python=str(player.python))
    reward = ReasoningReward(config, WorkerContext(role="reward"))
    (score,) = reward.score([_record(Prompt(row=0, text="?"), "1")])
    assert score.value is None and "environments/reasoning" in score.reason
    with pytest.raises(DataError, match="gdc"):
        reward.score([_record(Prompt(row=0, text="?", fields={"number": 0}), "1")])


@pytest.mark.parametrize(
    "other", [{"questions_seed": 6}, {"size": 2}, {"options": {"min_terms": 5}}]
)
def test_a_reward_with_other_settings_than_the_rows_scores_nothing(
    player: Any, other: dict[str, Any]
) -> None:
    where = {"task": "chain_sum", "size": 8, "questions_seed": 5, "python": str(player.python)}
    rows = ReasoningRows(ReasoningRowsConfig(**where))
    given = [rows[n] for n in (2, 3)]
    for config, found in ((where, 1.0), (where | other, None)):
        reward = ReasoningReward(ReasoningRewardConfig(**config), WorkerContext(role="reward"))
        scores = reward.score([_record(row, row.fields["answer"]) for row in given])
        assert [score.value for score in scores] == [found, found]
    assert all("questions_seed" in score.reason for score in scores)


def test_an_episode_climbs_as_long_as_answers_are_right(player: Any) -> None:
    levels = [{"min_terms": terms, "max_terms": terms} for terms in (2, 3, 4)]
    options = {"min_digits": 1, "max_digits": 1}
    asked = []
    for level in levels:
        ((_, answer), *_), _ = player.plain(PLAIN, "chain_sum", {**options, **level}, [""] * 20)
        asked.append(answer)
    for right in range(4):

        def said(seen: dict[str, Any], right: int = right) -> dict[str, Any]:
            question = seen["messages"][-1]["content"]
            level = question.count("+") + question.count("-") - 1
            return {"text": asked[level] if level < right else "none"}

        config = {"task": "chain_sum", "size": 64, "questions_seed": 3, "options": options}
        seen = player.play("reasoning:Reasoning", said, row={"number": 0}, levels=levels, **config)
        scores = [one["rewards"]["right"] for one in seen[1:]]
        assert sum(score == 1.0 for score in scores) == right
        assert len(scores) == min(right + 1, 3) and seen[-1]["done"]


def _record(prompt: Any, text: str) -> ScoredRecord:
    columns = {"action_ids": np.zeros(1, np.int32)}
    return ScoredRecord(
        ordinal=0, sample=0, prompt=prompt, text=text, status="finished", columns=columns
    )
