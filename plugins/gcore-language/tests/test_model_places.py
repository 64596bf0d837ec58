"""What a worker could not open of a model is known before the worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gcore_language.model_places import directory_here, position_limit, problems

from gcore_core.contract.looking import Look


def told(path: Path | str, *, here: bool = True, **model: Any) -> list[str]:
    role = {"use": "mine", "model": {"path": str(path), **model}}
    others = {"use": "others", "model": {"path": "/nowhere"}}
    return sentences({"policy": role, "judge": others}, here=here)


def sentences(roles: dict[str, Any], *, here: bool = True) -> list[str]:
    """What is known without an engine's libraries."""
    return [said for said in problems({"roles": roles}, "mine", here) if isinstance(said, str)]


def written(directory: Path, *names: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).touch()
    return directory


def test_a_directory_that_is_not_there_is_told_with_the_one_that_was_meant(tmp_path: Path) -> None:
    written(tmp_path / "base")
    [problem] = told(tmp_path / "bass")
    assert problem.startswith(f"roles.policy.model.path: there is no directory {tmp_path}/bass")
    assert "did you mean 'base'?" in problem
    assert told(tmp_path / "bass", here=False) == [], "a worker's machine may have it"


def test_a_directory_without_config_weights_or_tokenizer_is_told(tmp_path: Path) -> None:
    assert (
        "has no config.json, so it is no model (it has a.txt)"
        in told(written(tmp_path / "empty", "a.txt"))[0]
    )
    bare = told(written(tmp_path / "bare", "config.json"))
    assert ["no weights in safetensors" in bare[0], "no tokenizer" in bare[1]] == [True, True]
    whole = written(tmp_path / "bare", "model.safetensors", "tokenizer.json")
    assert told(whole) == []


def test_a_reference_that_is_not_there_is_told(tmp_path: Path) -> None:
    def of(path: str) -> list[str]:
        role = {"use": "mine", "model": {"make": {}}, "config": {"reference_path": path}}
        return sentences({"policy": role})

    [problem] = of(str(tmp_path / "gone"))
    assert problem.startswith("roles.policy.config.reference_path: there is no directory ")
    assert of(str(tmp_path)) == of("") == []


@pytest.mark.parametrize(
    "tokenizer", ["tokenizer.model", "vocab.txt", "spiece.model", "tokenizer_config.json"]
)
def test_any_kind_of_tokenizer_is_one(tmp_path: Path, tokenizer: str) -> None:
    assert told(written(tmp_path, "config.json", "model.safetensors", tokenizer)) == []


def test_a_hub_name_is_told_only_offline_and_only_where_the_cache_does_not_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert told("org/model") == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "models--org--model"
    written(repository / "snapshots" / "abc", "config.json", "a.safetensors", "tokenizer.json")
    written(repository / "refs")
    (repository / "refs" / "main").write_text("abc")
    assert told("org/model") == told("org/model", revision="abc") == []
    assert directory_here("org/model") == repository / "snapshots" / "abc"
    [problem] = told("org/other")
    assert "org/other is neither a directory nor in the cache of the hub" in problem
    assert "models there: org/model; unset it, or download" in problem
    assert len(told("org/model", revision="def")) == 1


def test_a_model_that_the_run_has_not_made_yet_is_no_problem() -> None:
    made = {"make": {"path": "make.py", "name": "make"}}
    assert list(problems({"roles": {"policy": {"use": "mine", "model": made}}}, "mine", True)) == []


def test_each_model_that_is_there_is_looked_at_as_it_will_be_opened(tmp_path: Path) -> None:
    written(tmp_path, "config.json", "model.safetensors", "tokenizer.json")
    trainer = {"python": "venv:mine", "config": {"trust_remote_code": True, "reference_path": ""}}
    roles = {
        "policy": {"use": "mine", "model": {"path": str(tmp_path)}, **trainer},
        "judge": {"use": "mine/other", "model": {"path": str(tmp_path), "make": {}}},
    }
    policy, judge = problems({"roles": roles}, "mine", True)
    assert isinstance(policy, Look) and isinstance(judge, Look)
    assert (policy.where, policy.python) == ("roles.policy.model.path", "venv:mine")
    assert policy.files == (str(tmp_path),)
    assert policy.arguments["kind"] == "trainer" and policy.arguments["trust_remote_code"] is True
    assert (judge.where, judge.arguments["kind"]) == ("roles.judge.model.make", "language")
    assert judge.arguments["generates"] is True


@pytest.mark.parametrize(
    ("follower", "generates"), [("mine", True), ("mine/other", True), ("theirs", False)]
)
def test_a_trainers_model_is_looked_at_as_its_followers_of_the_same_plugin_open_it(
    follower: str, generates: bool, tmp_path: Path
) -> None:
    written(tmp_path, "config.json", "model.safetensors", "tokenizer.json")
    model = {"model": {"path": str(tmp_path)}, "config": {"reference_path": ""}}
    roles = {"policy": {"use": "mine", **model}, "rollout": {"use": follower, "follows": "policy"}}
    (look,) = problems({"roles": roles}, "mine", True)
    assert isinstance(look, Look)
    assert look.arguments["kind"] == "trainer" and look.arguments["generates"] is generates


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 8, "n_ctx": 9}, 8),
        ({"n_positions": 8}, 8),
        ({"n_ctx": 8}, 8),
        ({"max_seq_len": 8}, 8),
        ({"max_position_embeddings": None, "max_seq_len": -1}, None),
        ({}, None),
    ],
)
def test_how_long_a_text_may_be_is_read_by_each_familys_name_for_it(
    config: dict[str, Any], limit: int | None
) -> None:
    assert position_limit(config) == limit
