"""Trains a model by the call of Python."""

import gcore
from functions import length

if __name__ == "__main__":
    run = gcore.train(
        model={"make": {"path": "functions.py", "name": "make"}},
        reward=length,
        data="rows.jsonl",
        run={"steps": 1},
        controller={"config": {"prompts": 4}},
        roles__rollout__config__max_new_tokens=4,
    )
    assert [row["step"] for row in run.rows][-1] == 1, run.rows
