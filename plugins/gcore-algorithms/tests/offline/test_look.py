"""What is seen of a job's rows before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_language.tiny import save_model

from gcore_core.config.plan import load_plan
from gcore_core.contract.launching import NodeFacts
from gcore_core.run.memory_needs import _shape
from gcore_core.run.preflight import check_files


def job(folder: Path, kind: str, *rows: dict[str, Any]) -> Path:
    """Writes a job that trains a tiny model on rows; returns its file."""
    save_model(folder / "model", "llama")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    data = "pairs" if kind == "pairs" else "chat"
    settings = {
        "run": {"name": "look", "steps": 1},
        "controller": {"use": f"offline/{kind}", "config": {"prompts": 4}},
        "data": {"use": f"offline/{data}", "config": {"path": "rows.jsonl"}},
        "objective": {"use": "offline/dpo" if kind == "pairs" else "offline/sft"},
        "roles": {
            "policy": {"use": "torch", "model": {"path": str(folder / "model")}},
            "rollout": {"use": "offline"},
        },
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return file


LONG_PROMPT = {"prompt": "1+2=", "completion": "3"}
LONG_ANSWER = {"prompt": "1", "completion": "33"}


@pytest.mark.parametrize(
    ("kind", "rows", "answer", "group"),
    [
        ("sft", [LONG_PROMPT, LONG_ANSWER], 3, 1),
        ("pairs", [{"prompt": "1+2=", "chosen": "3", "rejected": "4567"}], 5, 2),
    ],
)
def test_the_longest_prompt_and_answer_and_the_records_of_a_row_are_counted(
    kind: str, rows: list[dict[str, Any]], answer: int, group: int, tmp_path: Path
) -> None:
    """A beginning and an answer's end count. So a plan is of the rows, not of the largest pass."""
    plan = load_plan(job(tmp_path, kind, *rows), [])
    nodes = [NodeFacts(name="agent.0", devices=(), host="")]
    facts = check_files(plan, nodes, say=lambda text: None).facts
    assert facts == {"prompt_tokens": 5, "answer_tokens": answer}
    shape = _shape(plan, "policy", "cpu", facts)
    assert (shape.group_size, shape.records) == (group, 4 * group)
    assert shape.facts == facts
