"""The task "reasoning": whole numbers that have to be worked out. Its rows.

python recipes/smollm2/reasoning.py        writes the rows again, next to this file

Needs the package reasoning-gym, to write rows and for nothing else.
"""

from __future__ import annotations

import random
from typing import Any

from topics import Row, asked, write

#: On each of these the model is right at first in 10 to 50 of 100 greedy answers.
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_value": 1, "max_value": 30},
    "lcm": {"min_value": 1, "max_value": 12},
    "number_sequence": {},
}
TRAIN, HELD_OUT = 80, 16


def rows(task: str) -> list[Row]:
    """Draws questions of a task of reasoning-gym; no two are the same."""
    import reasoning_gym

    drawn: dict[str, Row] = {}
    settings = {"size": 4 * (TRAIN + HELD_OUT), "seed": 1, **TASKS[task]}
    for made in reasoning_gym.create_dataset(task, **settings):
        prompt = asked(f"{made['question']}\nGive only the answer.")
        drawn[made["question"]] = {"prompt": prompt, "answer": made["answer"], "task": task}
    return list(drawn.values())[: TRAIN + HELD_OUT]


def main() -> None:
    drawn = [rows(task) for task in TASKS]
    train = [row for each in drawn for row in each[:TRAIN]]
    heldout = [row for each in drawn for row in each[TRAIN:]]
    random.Random(1).shuffle(train)
    random.Random(2).shuffle(heldout)
    write("reasoning", train, heldout)


if __name__ == "__main__":
    main()
