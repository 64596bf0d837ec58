"""Whole runs with frozen models: the reference of a role, a lost worker, no reward at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_testing.runs import run_recipe
from gcore_testing.safetensors_files import read_safetensors

from gcore_core.contract.run_files import read_metrics
from tests.support import language_models as tiny

pytestmark = pytest.mark.rest

GUIDE = Path(__file__).parents[4] / "docs" / "how-to" / "distillation.md"
STEPS = 3

DIES = '''
"""The teacher's annotator; its worker is killed once, in the second step."""
import os
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract.providers import AnnotatorProvider
from gcore_algorithms.teacher.annotator import FrozenModel
from gcore_algorithms.teacher.config import FrozenModelConfig


class Dies(FrozenModel):
    def annotate(self, records):
        given = super().annotate(records)
        if min(record.ordinal for record in records) >= 4 and not os.path.exists("died"):
            Path("died").touch()
            os.kill(os.getpid(), 9)
        return given


@hookimpl
def gcore_annotators():
    yield AnnotatorProvider(summary="-", factory="dies:Dies", config=FrozenModelConfig)
'''


def job(**roles: Any) -> dict[str, Any]:
    """Returns a job of three deterministic steps on tiny models, in one process."""
    return {
        "run": {"steps": STEPS, "deterministic": True},
        "launcher": {"use": "core/inline"},
        "controller": {"shards": 2, "config": {"prompts": 4, "minibatches": 2}},
        "data": {"use": "core/jsonl", "config": {"path": "rows.jsonl"}},
        "advantage": {"use": "teacher/no-reward"},
        "objective": {"use": "teacher/reverse-kl"},
        "roles": {
            "policy": {
                "use": "torch",
                "model": {"path": "policy"},
                "config": {"learning_rate": 1e-2},
            },
            "rollout": {"use": "torch", "config": {"max_new_tokens": 6}},
            **roles,
        },
    }


@pytest.fixture
def finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives a function that runs a job; it returns its rows of metrics and its final weights."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("policy", 0), ("student", 0), ("teacher", 1)):
        tiny.save_model(tmp_path / name, "llama", seed=seed)
    rows = [json.dumps({"prompt": f"{i}+{i + 1}="}) for i in range(8)]
    for file in ("rows.jsonl", "prompts.jsonl"):
        (tmp_path / file).write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(
        "def digits(record):\n    return sum(c.isdigit() for c in record.text) / 6\n"
    )
    (tmp_path / "dies.py").write_text(DIES)

    def run(name: str, made: dict[str, Any], *overrides: str) -> tuple[list[Any], dict[str, Any]]:
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(made))
        directory = tmp_path / "runs" / name
        run_recipe(file, directory, overrides, timeout_s=300)
        metrics = [row["metrics"] for row in read_metrics(directory) if row["step"]]
        weights = read_safetensors(directory / "weights" / "model.safetensors")
        return metrics, {spec.name: array.tobytes() for spec, array in weights}

    return run


def test_a_reference_by_a_role_gives_the_losses_of_the_trainers_own(finish: Any) -> None:
    """To the last bit in a deterministic run, whichever worker and tile a record is in."""
    rewarded = job()
    rewarded["advantage"] = {"use": "algorithms/grpo", "config": {"group_size": 4}}
    kl = {"coefficient": 0.1, "estimator": "k2"}
    rewarded["objective"] = {"use": "algorithms/ppo_clip", "config": {"kl": kl}}
    function = {"path": "reward.py", "name": "digits"}
    rewarded["rewards"] = {"digits": {"use": "core/function", "config": function}}
    own, weights = finish("own", rewarded)
    role = {**rewarded, "roles": {**rewarded["roles"], "reference": {"use": "teacher", "slots": 2}}}
    by_role, other_weights = finish("role", role)
    assert [m["loss"] for m in by_role] == [m["loss"] for m in own]
    assert [m["kl_reference"] for m in by_role] == [m["kl_reference"] for m in own]
    assert own[-1]["kl_reference"] > 0
    assert other_weights == weights


def test_the_job_of_the_guide_comes_nearer_to_its_teacher_without_a_reward(finish: Any) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    made = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    metrics, _ = finish("guide", made, "launcher.use=core/inline")
    assert len(metrics) == made["run"]["steps"]
    assert metrics[-1]["teacher_jsd"] < 0.7 * metrics[0]["teacher_jsd"]
    assert all("reward" not in row for row in metrics)


@pytest.mark.slow
def test_a_killed_teacher_is_asked_again_and_the_weights_are_the_same(
    finish: Any, tmp_path: Path
) -> None:
    teacher = {"use": "teacher", "model": {"path": "teacher"}}
    _, calm = finish("calm", job(teacher=teacher))
    made = {**job(teacher={**teacher, "use": "dies"}), "local": ["dies.py"]}
    made["launcher"] = {"use": "core/local"}
    _, stormy = finish("stormy", made)
    assert (tmp_path / "died").exists()
    assert stormy == calm
