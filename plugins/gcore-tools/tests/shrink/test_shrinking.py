"""A small job has all parts of the job that it is made of, and loads on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_tools.shrink.commands import read_job, shrink
from gcore_tools.shrink.shrinking import Shrinking

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError

RECIPES = Path(__file__).parents[4] / "recipes"
JOB = """
run: {name: large, steps: 500, dir: runs/large}
launcher: {use: nodes/join, config: {hosts: 2}}
cluster: {devices: 16}
controller: {shards: 4, config: {prompts: 1024, minibatches: 8}}
data:
  use: data/hub
  config:
    path: someone/riddles
    columns: {prompt: riddle, answer: solution.text}
    extract: {answer: "It is {answer}."}
advantage: {use: algorithms/grpo, config: {group_size: 16}}
objective: {use: algorithms/ppo_clip}
roles:
  policy:
    use: megatron
    slots: 8
    python: venv:megatron
    model: {path: Qwen/Qwen3-4B, revision: abc}
    config: {tensor_parallel: 4, learning_rate: 3.0e-6}
  rollout:
    use: vllm
    slots: 8
    python: venv:vllm
    engine: {enforce_eager: true}
    config: {tensor_parallel: 2, max_new_tokens: 4096, temperature: 0.9}
rewards:
  exact: {use: rewards/exact-match, workers: 4, config: {pattern: 'It is (.*)'}}
"""


@pytest.fixture(scope="module", autouse=True)
def _no_engine_is_installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Names an empty folder of venvs: that of this machine may have the engines."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("G_CORE_VENVS", str(tmp_path_factory.mktemp("venvs")))
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("small")
    (folder / "job.yaml").write_text(JOB)
    to = folder / "small.yaml"
    assert shrink([str(folder / "job.yaml"), "-o", str(to), "run.seed=3"]) == 0
    return to, yaml.safe_load(to.read_text())


def test_a_small_job_loads_and_keeps_what_the_job_is_about(
    small: tuple[Path, dict[str, Any]],
) -> None:
    path, job = small
    plan = load_plan(path)
    assert plan.settings.run.seed == 3 and plan.settings.run.steps == 2
    assert plan.settings.controller.shards == 4
    assert job["controller"]["config"] == {"prompts": 8, "minibatches": 8}
    assert job["advantage"] == {"use": "algorithms/grpo", "config": {"group_size": 4}}
    assert job["objective"] == {"use": "algorithms/ppo_clip"}
    assert set(job["rewards"]) == {"exact", "chance"}
    assert plan.settings.rewards["exact"].workers == 1
    assert job["roles"]["policy"]["config"]["learning_rate"] == 3e-6
    assert job["roles"]["rollout"]["config"]["temperature"] == 0.9
    assert "launcher" not in job and "dir" not in job["run"]


def test_an_engine_that_is_not_installed_becomes_torch_and_the_job_says_so(
    small: tuple[Path, dict[str, Any]],
) -> None:
    path, job = small
    for role in job["roles"].values():
        assert role["use"] == "torch" and role["slots"] == 2
        assert not {"python", "engine"} & set(role)
    text = path.read_text()
    assert "roles.policy: torch in place of megatron" in text
    assert "roles.rollout: torch in place of vllm" in text
    assert "engine" in text and "2 of 8 slots" in text


def test_roles_that_are_apart_stay_apart_and_others_share(tmp_path: Path) -> None:
    for devices, expected in ((16, 4), (8, 2)):
        (tmp_path / "job.yaml").write_text(JOB)
        small = Shrinking(
            job=read_job(tmp_path / "job.yaml", [f"cluster.devices={devices}"]),
            directory=tmp_path,
            steps=2,
            slots=2,
            engine="torch",
        )
        small.run()
        assert small.job["cluster"] == {"devices": expected}


def test_a_twin_has_the_type_of_its_original_and_few_weights(
    small: tuple[Path, dict[str, Any]],
) -> None:
    import json

    path, job = small
    model = Path(job["roles"]["policy"]["model"]["path"])
    assert job["roles"]["policy"]["model"] == {"path": str(model)}
    assert model.is_relative_to(path.parent)
    config = json.loads((model / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert (model / "model.safetensors").stat().st_size < 2**20


def test_rows_have_the_columns_that_the_settings_name(small: tuple[Path, dict[str, Any]]) -> None:
    from gcore_core.contract.factories import build

    plan = load_plan(small[0])
    rows = build(plan.factory("data"))
    assert len(rows) == 24
    assert rows[1].text == "What is 1+1?"
    assert rows[1].fields["answer"] == "2"


def test_what_stays_is_written_as_it_was_since_it_may_be_a_text(tmp_path: Path) -> None:
    large = JOB.replace("name: large", "name: 0012").replace("revision: abc", "revision: 1e3")
    (tmp_path / "job.yaml").write_text(large)
    to = tmp_path / "small.yaml"
    override = "rewards.exact.timeout_s=1e1"
    assert shrink([str(tmp_path / "job.yaml"), "-o", str(to), override]) == 0
    assert load_plan(to).name == "0012" and "timeout_s: 1e1\n" in to.read_text()


def test_files_beside_a_job_are_found_from_wherever_the_small_one_lies(tmp_path: Path) -> None:
    job = yaml.safe_load(JOB)
    job["local"] = ["mine.py"]
    job["roles"]["rollout"]["python"] = "envs/vllm/bin/python"
    job["roles"]["policy"]["config"] = {"reference_path": "./base"}
    job["data"]["config"]["path"] = "~/rows.jsonl"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    read = read_job(tmp_path / "job.yaml", [])
    assert read["local"] == [str(tmp_path / "mine.py")]
    assert read["roles"]["policy"]["config"]["reference_path"] == str(tmp_path / "base")
    assert read["data"]["config"]["path"] == str(Path("~/rows.jsonl").expanduser().resolve())
    assert read["roles"]["rollout"]["python"] == str(tmp_path / "envs/vllm/bin/python")
    assert read["roles"]["policy"]["python"] == "venv:megatron"


def test_a_model_that_nobody_knows_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("Qwen/Qwen3-4B", "someone/unknown"))
    with pytest.raises(ConfigError) as error:
        shrink([str(tmp_path / "job.yaml"), "-o", str(tmp_path / "small.yaml")])
    assert "roles.policy: there is no twin of someone/unknown" in str(error.value)
    assert not (tmp_path / "small.yaml").exists()


def test_a_judge_that_the_job_makes_keeps_what_it_is_asked(tmp_path: Path) -> None:
    small = Shrinking(
        job=read_job(RECIPES / "judge.yaml", []),
        directory=tmp_path,
        steps=2,
        slots=2,
        engine="torch",
    )
    small.run()
    job = yaml.safe_load((RECIPES / "judge.yaml").read_text())
    assert small.job["rewards"]["judged"] == job["rewards"]["judged"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("")
    with pytest.raises(ConfigError, match="there is a file already"):
        shrink([str(RECIPES / "quickstart.yaml"), "-o", str(tmp_path / "small.yaml")])


def test_files_beside_the_job_are_found_from_elsewhere() -> None:
    job = read_job(RECIPES / "quickstart.yaml", [])
    assert Path(job["data"]["config"]["path"]).is_file()
    assert Path(job["rewards"]["exact"]["config"]["path"]).is_file()
    assert Path(job["roles"]["policy"]["model"]["make"]["path"]).is_file()
