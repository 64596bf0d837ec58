"""benchmarks/rewards.py in short: its cases are whole, and its claims count what they say."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import import_file

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def rewards() -> ModuleType:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)  # it imports report.py, which lies beside it
        return import_file(BENCHMARKS / "rewards.py")


def test_every_case_has_two_texts_and_a_verdict_and_the_source_is_named(
    rewards: ModuleType,
) -> None:
    content = json.loads(rewards.CASES.read_text())
    assert "math-verify 0.9.0" in content["source"]
    assert "Apache-2.0" in content["license"]
    assert len(content["cases"]) == 275
    for case in content["cases"]:
        assert isinstance(case["gold"], str) and isinstance(case["answer"], str)
        assert case["expected"] in (0, 1)
        assert set(case["forms"]) <= {"latex", "expr"}


def test_numbers_that_the_suite_tells_apart_are_never_the_same(rewards: ModuleType) -> None:
    """Of the two that are taken for the same, the suite says only that their text is no LaTeX."""
    numeric = rewards.Numeric(rewards.VerifierConfig(), WorkerContext(role="scorer"))
    cases = [
        rewards.Case(values, None, rewards.score(numeric, values))
        for values in json.loads(rewards.CASES.read_text())["cases"]
    ]
    wrong = [case.values for case in cases if case.is_false_positive]
    assert [case["answer"] for case in wrong] == ["Answer $ \n 9 \n $", "Answer \\( \n 9 \n \\)"]
    assert all(case["forms"] == ["latex"] for case in wrong)


def test_every_case_that_is_left_out_is_named_and_stands_in_the_suite(rewards: ModuleType) -> None:
    cases = [
        rewards.Case(values, None, None)
        for values in json.loads(rewards.CASES.read_text())["cases"]
    ]
    assert sum(case.is_excluded for case in cases) == len(rewards.EXCLUDED) == 5
    assert all(rewards.EXCLUDED.values())


def test_a_spelling_is_wrong_where_any_reader_says_another_number(rewards: ModuleType) -> None:
    numeric = rewards.Numeric(rewards.VerifierConfig(), WorkerContext(role="scorer"))
    for text, right, alone, wrong in (
        ("5", "5", True, False),
        ("5", "6", True, True),
        ("sqrt(16)", None, False, False),
        ("sqrt(16)", "4", False, True),
        ("It is 5", "5", False, False),
        ("It is 5", "5", True, True),  # it is not alone
        ("50%", "50", True, True),
    ):
        spelling = {"text": text, "right": right, "alone": alone}
        assert rewards.is_misread(spelling, numeric) == wrong, spelling


def test_shares_and_counts_are_those_of_the_cases(rewards: ModuleType) -> None:
    texts = {"gold": "1", "answer": "2"}
    plain = {**texts, "expected": 1, "forms": ["expr"]}
    wrong = {**texts, "expected": 0, "forms": ["latex", "expr"]}
    only_latex = {**texts, "expected": 0, "forms": ["latex"]}
    other = {"gold": "$f(x)$", "answer": "$f(y)$", "expected": 1, "forms": ["latex"]}
    cases = [
        rewards.Case(plain, 1.0, 0.0),
        rewards.Case(wrong, 0.0, 1.0),
        rewards.Case(wrong, None, None),
        rewards.Case(only_latex, 0.0, 1.0),
        rewards.Case(other, 0.0, 1.0),
    ]
    claims = {claim.name: claim for claim in rewards.claims(cases, 0.002)}
    assert {name: claim.value for name, claim in claims.items()} == {
        "math_agreement": 3 / 4,
        "math_cases": 4,
        "math_excluded": 1,
        "math_agreement_all": 3 / 5,
        "math_cases_all": 5,
        "math_refused": 1,
        "math_ms": 2,
        "numeric_false_positives": 1,
        "numeric_right_but_not_latex": 1,
        "numeric_agreement": 1 / 4,
        "numeric_cases": 4,
    }
    assert claims["numeric_false_positives"].missed
    assert claims["math_agreement"].missed
