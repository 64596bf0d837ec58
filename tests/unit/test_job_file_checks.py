"""A reward function that is not in its file is told before anything starts."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from gcore_core.builtin.checks import problems_of, top_names


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


def test_the_file_is_not_run(tmp_path: Path) -> None:
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
