"""What cannot be a job with a teacher is refused before a process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import fake

from gcore_core.config.plan import Plan, load_plan
from gcore_core.contract.errors import ConfigError
from tests.support import language_models as tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gives a directory with the models policy, teacher and other, and rows."""
    root = tmp_path_factory.mktemp("job")
    for name in ("policy", "teacher", "other"):
        tiny.save_model(root / name, "llama")
    tiny.save_model(root / "knows-more", "llama", extra=3)
    file = root / "other" / "tokenizer.json"
    parsed = json.loads(file.read_text())
    words = parsed["model"]["vocab"]
    words["7"], words["8"] = words["8"], words["7"]
    file.write_text(json.dumps(parsed))
    (root / "rows.jsonl").write_text('{"prompt": "1+2="}\n')
    (root / "reward.py").write_text("def one(record):\n    return 1.0\n")
    return root


def plan_of(directory: Path, *overrides: str, **sections: Any) -> Plan:
    job: dict[str, Any] = {
        "run": {"steps": 1},
        "data": {"use": "core/jsonl", "config": {"path": "rows.jsonl"}},
        "advantage": {"use": "teacher/no-reward"},
        "objective": {"use": "teacher/reverse-kl"},
        "roles": {
            "policy": {"use": "torch", "model": {"path": "policy"}},
            "rollout": {"use": "torch"},
            "teacher": {"use": "teacher", "model": {"path": "teacher"}},
        },
        **sections,
    }
    (directory / "job.yaml").write_text(json.dumps(job))
    return load_plan(directory / "job.yaml", overrides)


def test_a_job_with_a_teacher_needs_no_reward(directory: Path) -> None:
    plan = plan_of(directory)
    assert not plan.settings.rewards
    assert [column.name for column in plan.columns["teacher"]] == ["teacher_logp"]


def test_a_teacher_that_gives_its_likeliest_tokens_says_how_many(directory: Path) -> None:
    plan = plan_of(directory, "roles.teacher.config.top_k=4", "objective.use=teacher/jsd")
    shapes = {column.name: column.shape(2) for column in plan.columns["teacher"]}
    assert shapes == {
        "teacher_logp": (2,),
        "teacher_topk_ids": (2, 4),
        "teacher_topk_logp": (2, 4),
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["roles.teacher.model.path=other"],
            "roles.teacher.model: its tokenizer is not the policy's, so that the same ids are "
            "other texts to it, and neither log-probs of actions nor likeliest tokens can be "
            "compared (2 of the policy's 22 tokens have another id or none: '7' is 10 and 11, '8' "
            "is 11 and 10); take a teacher of the policy's family.",
        ),
        (
            ["roles.reference={use: teacher, model: {path: other}}"],
            "roles.reference.model: its tokenizer is not the policy's",
        ),
        (
            ["roles.teacher.config.top_k=23"],
            "roles.teacher.config.top_k: 23 likeliest tokens are more than the 22 that the model "
            "has.",
        ),
        (
            ["roles.teacher.config.top_k=24", "roles.teacher.model.path=knows-more"],
            "roles.teacher.config.top_k: 24 likeliest tokens are more than the 22 that the policy "
            "has.",
        ),
        (
            ["roles.reference={use: teacher, config: {top_k: 2}}"],
            "roles.reference.config.top_k: a reference gives no likeliest tokens",
        ),
        (
            ["roles.teacher.engine={compile: true}"],
            "roles.teacher.engine: teacher has no engine, so compile would go nowhere; its "
            "settings stand under config.",
        ),
        (
            ["objective.use=teacher/jsd"],
            "objective: requires 'teacher_topk_ids', which roles.teacher gives only where "
            "roles.teacher.config says of how many numbers; set that.",
        ),
        (
            ["objective.config.reward_weight=1"],
            "objective.config.reward_weight: advantage teacher/no-reward is 0 everywhere",
        ),
        (
            ["objective.use=algorithms/ppo_clip"],
            "objective.use: advantage teacher/no-reward is 0 everywhere",
        ),
        (
            ["advantage.use=algorithms/grpo"],
            "rewards.<name>",
        ),
    ],
)
def test_what_no_run_could_learn_from_is_refused(
    overrides: list[str], message: str, directory: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(directory, *overrides)
    assert message in str(caught.value)


def test_a_teacher_has_a_model_of_its_own(directory: Path) -> None:
    roles = {
        "policy": {"use": "torch", "model": {"path": "policy"}},
        "rollout": {"use": "torch"},
        "teacher": {"use": "teacher"},
    }
    with pytest.raises(ConfigError, match="roles.teacher.model: a teacher is another model"):
        plan_of(directory, roles=roles)


def test_an_objective_of_a_teacher_needs_the_role(directory: Path) -> None:
    roles = {
        "policy": {"use": "torch", "model": {"path": "policy"}},
        "rollout": {"use": "torch"},
    }
    with pytest.raises(ConfigError) as caught:
        plan_of(directory, roles=roles)
    assert "requires 'teacher_logp', which roles.teacher gives; add that role." in str(caught.value)


@pytest.mark.parametrize("trainer", ["torch", "megatron", "deepspeed"])
def test_every_trainer_of_language_models_learns_from_a_teachers_likeliest_tokens(
    trainer: str, directory: Path
) -> None:
    overrides = [f"roles.policy.use={trainer}", "objective.use=teacher/jsd"]
    plan = plan_of(directory, *overrides, "roles.teacher.config.top_k=4")
    assert [column.name for column in plan.columns["teacher"]] == [
        "teacher_logp",
        "teacher_topk_ids",
        "teacher_topk_logp",
    ]


def test_likeliest_tokens_need_a_trainer_that_computes_their_log_probs(directory: Path) -> None:
    overrides = ["roles.policy.use=fake", "objective.use=teacher/jsd"]
    with pytest.raises(ConfigError) as caught:
        plan_of(directory, *overrides, "roles.teacher.config.top_k=4", local=[fake.__file__])
    assert (
        "objective: requires 'logp@teacher_topk_ids', log-probs of other tokens than the actions, "
        "and fake, which roles.policy uses, does not compute them; take a trainer with the "
        "trait token_logprobs, such as torch"
    ) in str(caught.value)
