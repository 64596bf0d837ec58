"""The stages of ``tox run``: what fails ends them, a budget is held, and no test is left out."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests import stages
from tests.stages import FIRST, REST, Stage


def test_a_stage_prints_its_time_and_its_budget(capfd: pytest.CaptureFixture[str]) -> None:
    assert stages.run_stages([Stage(name="quiet", budget_min=5, commands=("true", "true"))]) == 0
    assert "stage quiet: 0 min of 5 min" in capfd.readouterr().out


def test_the_first_command_that_fails_ends_all_stages(
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = Stage(name="broken", budget_min=5, commands=("false", "echo second"))
    after = Stage(name="after", budget_min=5, commands=("echo third",))
    assert stages.run_stages([broken, after]) == 1
    printed = capfd.readouterr().out
    assert printed.splitlines()[-1] == "stage broken: FAILED, exit code 1 of: false"
    assert "second" not in printed
    assert "third" not in printed


def test_commands_at_once_do_not_wait_for_each_other_and_all_print(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of two waits for a file that the other one makes."""
    one, other = tmp_path / "one", tmp_path / "other"
    wait = (
        "sh -c 'touch {own}; until test -e {other}; do sleep 0.05; done; echo {name}; exit {code}'"
    )
    commands = (
        wait.format(own=one, other=other, name="first", code=0),
        wait.format(own=other, other=one, name="second", code=3),
    )
    stage = Stage(name="both", budget_min=1, commands=commands, at_once=True)
    assert stages.run_stages([stage]) == 1
    printed = capfd.readouterr().out
    assert "first\n" in printed and "second\n" in printed
    assert "stage both: FAILED, exit code 3 of: sh -c" in printed.splitlines()[-1]


def test_a_stage_that_takes_four_times_its_budget_is_ended_and_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    began_s = time.monotonic()
    slow = Stage(name="slow", budget_min=0.5 / 60, commands=("sleep 60",))
    assert stages.run_stages([slow]) == 1
    assert time.monotonic() - began_s < 30
    assert "stage slow: FAILED, took 4 times its budget" in capfd.readouterr().out
    both = Stage(name="both", budget_min=0.5 / 60, commands=("sleep 60", "sleep 61"), at_once=True)
    assert stages.run_stages([both]) == 1
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize("stages_of_a_command", [FIRST, REST], ids=["first", "rest"])
def test_every_test_file_belongs_to_exactly_one_stage(
    stages_of_a_command: tuple[Stage, ...],
) -> None:
    """Marks say which tests of a file a stage runs: each those that the other one leaves out."""
    folders = [
        Path(word)
        for stage in stages_of_a_command
        for command in stage.commands
        if " pytest " in command
        for word in shlex.split(command)
        if word.startswith(("tests/", "plugins", "contrib/"))
    ]
    files = [
        *stages.ROOT.glob("tests/**/test_*.py"),
        *stages.ROOT.glob("plugins/*/tests/**/test_*.py"),
        *stages.ROOT.glob("contrib/gcore-migrate/tests/test_*.py"),
    ]
    assert len(files) > 100
    for file in files:
        path = file.relative_to(stages.ROOT)
        holding = [folder for folder in folders if path.is_relative_to(folder)]
        assert len(holding) == 1, f"{path} belongs to {holding}"


def test_no_mark_leaves_a_test_out_of_both_commands() -> None:
    """Whatever marks a test has, one stage runs it unless it is slow or of an engine."""
    expressions = [
        shlex.split(command)[shlex.split(command).index("-m", 3) + 1]
        for stage in (*FIRST, *REST)
        for command in stage.commands
        if " pytest " in command
    ]
    in_process, processes = expressions[0::2], expressions[1::2]
    for pair in (in_process, processes):
        for mark in ({"rest"}, {"protects"}, set()):
            runs = [Expression.compile(words).evaluate(mark.__contains__) for words in pair]
            assert runs.count(True) == 1, (pair, mark)
            slow = mark | {"slow"}
            assert not any(Expression.compile(words).evaluate(slow.__contains__) for words in pair)


def test_marks_of_few_tests_stand_in_the_files_of_these_tests() -> None:
    """For such a mark no other file is opened (conftest.py): one from an import would be lost."""
    said = {
        path.relative_to(stages.ROOT)
        for folder in ("tests", "plugins", "contrib")
        for path in (stages.ROOT / folder).rglob("*.py")
        if re.search(r"mark\.(protects|rest)\b", path.read_text(encoding="utf-8"))
    }
    assert len(said) > 50
    assert [path for path in said if not path.name.startswith("test_")] == []


def test_the_budgets_fit_into_20_minutes_of_a_newcomer_and_60_of_a_change() -> None:
    first_min = sum(stage.budget_min for stage in FIRST)
    assert first_min <= 20
    assert first_min + sum(stage.budget_min for stage in REST) <= 60
