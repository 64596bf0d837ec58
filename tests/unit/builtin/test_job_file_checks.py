"""A reward function that is not in its file is told before anything starts."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from gcore_tools.plan.looking import look_at

from gcore_core.builtin.checks import function_looks, problems_of, top_names


def plan(**sections: Any) -> dict[str, Any]:
    return {"rewards": {}, **sections}


def function(path: Path, name: str) -> dict[str, Any]:
    return {"mine": {"use": "core/function", "config": {"path": str(path), "name": name}}}


def test_a_function_that_is_not_in_its_file_is_told_with_the_one_that_was_meant(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("import a_module_that_only_the_worker_has\n\ndef polite(record): return 1.0\n")
    assert list(problems_of(plan(rewards=function(file, "polite")))) == []
    [problem] = problems_of(plan(rewards=function(file, "polit")))
    assert problem.startswith("rewards.mine.config.name: ")
    assert "has no function 'polit' (did you mean 'polite'?)" in problem


def test_a_file_that_is_no_python_is_told_and_one_that_may_come_is_not(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    assert list(problems_of(plan(rewards=function(file, "polite")))) == []
    file.write_text("def polite(record)\n    return 1.0\n")
    [problem] = problems_of(plan(rewards=function(file, "polite")))
    assert f"{file}, line 1: no Python" in problem


def test_the_file_is_not_run_in_this_process(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("raise SystemExit('it was run')\ndef polite(record): return 1.0\n")
    assert list(problems_of(plan(rewards=function(file, "polite")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "async def polite(r): ...",
        "polite = lambda r: 1.0",
        "from other import polite",
        "from other import kind as polite",
        "from other import *",
        "if True:\n    def polite(r): ...",
        "globals()['polite'] = len",
        "def __getattr__(name): ...",
    ],
)
def test_a_function_that_may_be_bound_in_any_way_is_no_problem(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(text)
    assert list(problems_of(plan(rewards=function(file, "polite")))) == []


def test_a_job_without_rewards_of_a_function_has_nothing_to_check() -> None:
    assert list(problems_of({"data": {"use": "hub"}, "rewards": {"a": {"use": "x/y"}}})) == []


def test_names_of_a_module_are_rather_too_many_than_too_few() -> None:
    tree = ast.parse("import a.b\nc, d = 1, 2\nclass E: pass\ndef f():\n    g = 1\n")
    assert top_names(tree) == {"a", "c", "d", "E", "f", "g"}


# -- in a helper process ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))


def seen(**sections: Any) -> list[str]:
    looks = [("core", look) for look in function_looks(plan(**sections))]
    return list(look_at(looks, lambda text: None).problems)


def test_a_reward_that_does_not_import_is_told_with_its_key_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("\nfrom scores_of_mine import score as polite")
    (problem,) = seen(rewards=function(file, "polite"))
    assert problem.startswith(
        f"rewards.mine.config: {file}:2: does not import: ModuleNotFoundError"
    )
    assert "put scores_of_mine.py next to rewards.py" in problem
    (tmp_path / "scores_of_mine.py").write_text("def score(record): return 1 / 0")
    assert seen(rewards=function(file, "polite")) == []  # it is not called
    (tmp_path / "scores_of_mine.py").write_text("def score(record) return 1.0")
    assert len(seen(rewards=function(file, "polite"))) == 1  # the file beside was changed


@pytest.mark.parametrize(
    ("text", "batch", "is_called"),
    [
        ("def polite(record): ...", False, True),
        ("async def polite(record, *more, **others): ...", False, True),
        ("class Polite:\n    def __call__(self, records): ...\npolite = Polite()", True, True),
        ("from math import hypot as polite", False, True),
        ("def polite(): ...", False, False),
        ("def polite(prompts, completions): ...", True, False),
        ("def polite(completions, *, answer): ...", True, False),
    ],
)
def test_a_function_that_cannot_be_called_with_what_the_job_gives_is_told(
    text: str, batch: bool, is_called: bool, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(text)
    rewards = function(tmp_path / "rewards.py", "polite")
    rewards["mine"]["config"]["batch"] = batch
    problems = seen(rewards=rewards)
    if is_called:
        assert problems == []
        return
    assert problems[0].startswith("rewards.mine.config.name: polite(")
    assert ("is called with (records)" if batch else "is called with (record)") in problems[0]


def test_a_function_that_is_to_make_a_model_is_imported_until_it_has_made_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model.py"
    file.write_text("def teach(directory): ...")
    model = {"make": {"path": str(file), "name": "teach"}}
    (problem,) = seen(roles={"policy": {"model": model}})
    assert problem.startswith("roles.policy.model.make.name: teach(directory) in")
    assert "is called with (directory, config, progress)" in problem
    assert seen(roles={"policy": {"model": {**model, "path": "/made"}}}) == []
