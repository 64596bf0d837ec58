"""``g-core check`` tries verifiers: an empty answer must not be right, and a row's own must be."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, cast

import pytest
from gcore_rewards import gcore_check_files
from gcore_rewards.looks import problems

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.looking import Note
from gcore_core.contract.records import Prompt


class Rows:
    """A dataset of rows that have these fields."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Prompt:
        return Prompt(row=row, text="", fields=self._rows[row])


def seen(
    use: str, *rows: dict[str, Any], when: dict[str, Any] | None = None, **config: Any
) -> list[str]:
    """What is told of one reward and a dataset of these rows."""
    plan = {"rewards": {"right": {"use": use, "config": config, "when": when or {}}}}
    datasets = {"data": cast(Dataset, Rows(rows))}
    looks = list(gcore_check_files(plan, True, datasets))
    assert all(look.problems() == [] for look in looks)
    return [problem for look in looks for problem in problems(look.arguments)]


def test_rows_that_a_verifier_reads_are_no_problem() -> None:
    assert seen("rewards/exact-match", {"answer": "yes"}, {"answer": 3.0}, {"answer": True}) == []
    assert seen("rewards/exact-match", {"word": "Yes"}, answer="word", ignore_case=True) == []
    assert seen("rewards/numeric", {"answer": "1,234"}, {"answer": r"\frac{7}{2}"}) == []
    assert seen("rewards/code", {"tests": ["assert f(2) == 4"]}) == []
    assert seen("rewards/http", {"answer": ""}, url="http://localhost") == []


def test_a_pattern_is_no_reason_to_refuse_a_row() -> None:
    """No row's answer stands in the row as it must stand in a completion."""
    pattern = "<answer>(.*)</answer>"
    assert seen("rewards/exact-match", {"answer": "yes"}, pattern=pattern) == []
    assert seen("rewards/numeric", {"answer": "3"}, pattern=pattern) == []


@pytest.mark.parametrize("answer", ["", "  "])
def test_an_empty_answer_that_would_be_right_is_told_with_its_row(answer: str) -> None:
    (problem,) = seen("rewards/exact-match", {"answer": "yes"}, {"answer": answer})
    assert problem.startswith("rewards.right.config.answer: row 1 of data: an empty answer gets 1")


def test_an_answer_that_cannot_be_read_is_told_as_the_run_would() -> None:
    (problem,) = seen("rewards/numeric", {"answer": "4:30"})
    assert problem.startswith("rewards.right.config.answer: row 0 of the dataset")
    assert "is not one plain number: 4:30" in problem


def test_an_answer_that_no_row_has_is_told_with_what_it_has() -> None:
    told = seen("rewards/numeric", *[{"solution": "4"}] * 5)
    assert told[0] == (
        "rewards.right.config.answer: row 0 has no field 'answer'; it has: solution."
    )
    assert len(told) == 4 and "5 of 5 rows" in told[-1] and "rewards.right.when" in told[-1]


@pytest.mark.parametrize("value", [datetime.date(2024, 1, 2), b"2", Decimal("1.50"), {"x": b"2"}])
def test_an_answer_for_which_json_has_no_word_is_told_with_row_field_and_type(value: Any) -> None:
    (problem,) = seen("rewards/exact-match", {"answer": "yes"}, {"answer": value})
    assert problem.startswith("rewards.right.config.answer: row 1 of data: 'answer' holds ")
    inner = value["x"] if isinstance(value, dict) else value
    assert type(inner).__qualname__ in problem


def test_a_decimal_is_no_problem_of_what_reads_numbers() -> None:
    assert seen("rewards/numeric", {"answer": Decimal("1.50")}) == []


def test_rows_that_a_reward_is_not_for_are_not_looked_at() -> None:
    rows = [{"answer": "4", "source": "sums"}, {"source": "talk"}]
    assert seen("rewards/numeric", *rows, when={"source": "sums"}) == []
    assert seen("rewards/numeric", *rows, when={"source": ["sums", "more"]}) == []
    assert len(seen("rewards/numeric", *rows)) == 1


def test_tests_that_test_nothing_are_told_with_their_row() -> None:
    rows = [{"tests": "assert f(2) == 4"}, {"tests": "def check(f):\n    assert f(2) == 4"}]
    try:
        (problem,) = seen("rewards/code", *rows)
    except Exception as error:
        pytest.skip(f"programs cannot be confined here: {error}")
    assert problem.startswith("rewards.right.config.tests: row 1 has no tests in field 'tests'; ")
    assert "nobody calls check" in problem


def test_expressions_that_cannot_be_read_are_told() -> None:
    pytest.importorskip("math_verify", reason="needs gcore-rewards[math]")
    assert seen("rewards/math", {"answer": r"\sqrt{2}"}, {"answer": "(1, 2)"}) == []
    (problem,) = seen("rewards/math", {"answer": "$x ="})
    assert problem.startswith("rewards.right.config.answer: row 0 of the dataset")


def test_rows_that_are_compared_by_their_letters_are_noted() -> None:
    pytest.importorskip("math_verify", reason="needs gcore-rewards[math]")
    (note,) = seen("rewards/math", {"answer": "2516_8"}, {"answer": "x+1"}, {"answer": "5 cm"})
    assert isinstance(note, Note)
    assert "1 of 3 rows" in note and "row 0 of data: '2516_8'" in note


def test_code_is_not_tried_where_other_machines_run_it() -> None:
    plan = {"rewards": {"code": {"use": "rewards/code", "config": {}}}}
    datasets = {"data": cast(Dataset, Rows([{"tests": "pass"}]))}
    assert list(gcore_check_files(plan, False, datasets)) == []
    assert len(list(gcore_check_files(plan, True, datasets))) == 1


def test_of_many_rows_some_are_looked_at_from_the_first_to_the_last() -> None:
    plan = {"rewards": {"right": {"use": "rewards/numeric", "config": {}}}}
    datasets = {"data": cast(Dataset, Rows([{"answer": "1"}] * 5000))}
    (look,) = gcore_check_files(plan, True, datasets)
    rows = [row["row"] for row in look.arguments["rows"]]
    assert (len(rows), rows[0], rows[-1]) == (1000, 0, 4999)
