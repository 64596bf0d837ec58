"""What objectives, and training on answers of rows, need of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError

#: A trainer that claims nothing.
PLAIN = """
from gcore_core import hookimpl
from gcore_core.contract.providers import TrainerProvider


@hookimpl
def gcore_trainers():
    yield TrainerProvider(summary="-", factory="gcore_testing.fake:FakeTrainer")
"""
ROWS = {"use": "core/jsonl", "config": {"path": "rows.jsonl"}}
SAMPLED: dict[str, Any] = {
    "data": ROWS,
    "advantage": {"use": "algorithms/grpo"},
    "objective": {"use": "algorithms/ppo_clip"},
    "roles": {"policy": {"use": "plain"}, "rollout": {"use": "torch"}},
    "rewards": {"one": {"use": "core/function", "config": {"path": "f.py", "name": "one"}}},
    "local": ["plain.py"],
}
READ: dict[str, Any] = {
    "controller": {"use": "offline/sft"},
    "data": ROWS,
    "objective": {"use": "offline/sft"},
    "roles": {"policy": {"use": "plain"}, "rollout": {"use": "offline"}},
    "local": ["plain.py"],
}
ADAPTS = "objective.config.entropy.target=0.2"
EVALUATES = f"evaluation.data={json.dumps(ROWS)}"


def problems(directory: Path, job: dict[str, Any], *overrides: str) -> list[str]:
    """Returns what a job is refused for."""
    (directory / "plain.py").write_text(PLAIN)
    file = directory / "job.yaml"
    file.write_text(json.dumps(job))
    try:
        load_plan(file, overrides)
    except ConfigError as error:
        return list(error.facts["problems"])
    return []


@pytest.mark.parametrize("job", [SAMPLED, READ], ids=["sampled", "read"])
def test_a_trainer_that_claims_nothing_may_train(job: dict[str, Any], tmp_path: Path) -> None:
    assert problems(tmp_path, job) == []


def test_an_objective_that_adapts_has_a_trainer_that_shows_it_steps(tmp_path: Path) -> None:
    assert problems(tmp_path, SAMPLED, ADAPTS) == [
        "objective: algorithms/ppo_clip adapts its loss to what steps measure, and trainer plain "
        "shows it none and saves no state of it; take a trainer that does, or settings under which "
        "it stays as it is. [plugin algorithms]"
    ]
    assert problems(tmp_path, SAMPLED, ADAPTS, "roles.policy.use=torch") == []


def test_an_evaluation_on_rows_has_a_trainer_that_computes_the_loss(tmp_path: Path) -> None:
    assert problems(tmp_path, READ, EVALUATES) == [
        "evaluation.data: plain, which roles.policy uses, cannot compute a loss without an update; "
        "leave the evaluation out, or take another trainer. [plugin offline]"
    ]
    assert problems(tmp_path, READ, EVALUATES, "roles.policy.use=torch") == []


def test_a_reward_model_has_a_trainer_with_a_value_head(tmp_path: Path) -> None:
    pairs = ["controller.use=offline/pairs", "objective.use=offline/bradley-terry"]
    reader = "roles.rollout.use=offline/texts"
    assert problems(tmp_path, READ, *pairs, reader) == [
        "roles.policy.use: plain has no value head, which objective (offline/bradley-terry) "
        "trains; take a trainer with the trait value_head, such as torch."
    ]
    assert problems(tmp_path, READ, *pairs, reader, "roles.policy.use=torch") == []
