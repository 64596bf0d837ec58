"""Tasks of reasoning-gym, next to the library by itself."""

from __future__ import annotations

from typing import Any

import pytest

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
