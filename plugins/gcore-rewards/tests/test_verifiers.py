from __future__ import annotations

from typing import Any

import msgspec
import pytest
from gcore_rewards.config import VerifierConfig
from gcore_rewards.verifiers import ExactMatch, Numeric
from omegaconf import OmegaConf

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import Score, ScoredRecord

CONTEXT = WorkerContext(role="scorer")


def record(text: str, **fields: Any) -> ScoredRecord:
    prompt = Prompt(row=5, text="?", fields=fields)
    return ScoredRecord(
        ordinal=1, sample=0, prompt=prompt, text=text, status="finished", columns={}
    )


def reason(score: Score) -> str:
    """Of a score that failed; it may not carry a number."""
    assert score.value is None and score.status == "failed"
    return score.reason


def exact(text: str, answer: Any, **config: Any) -> float | None:
    return (
        ExactMatch(VerifierConfig(**config), CONTEXT).score([record(text, answer=answer)])[0].value
    )


def numeric(text: str, answer: Any, **config: Any) -> float | None:
    return Numeric(VerifierConfig(**config), CONTEXT).score([record(text, answer=answer)])[0].value


def test_exact_match_compares_stripped_text() -> None:
    assert exact(" 31\n", "31") == 1
    assert exact("31", 31) == 1
    assert exact("32", "31") == 0
    assert exact("", "31") == 0
    assert exact("yes", "Yes") == 0
    assert exact("yes", "Yes", ignore_case=True) == 1


def test_a_pattern_compares_its_last_match() -> None:
    assert exact("answer: 1, no, answer: 2", "2", pattern=r"answer: (\d)") == 1
    assert exact("answer: 2, no, answer: 1", "2", pattern=r"answer: (\d)") == 0
    assert exact("a1 b2", "b2", pattern=r"\w\d") == 1
    assert exact("nothing", "2", pattern=r"answer: (\d)") == 0
    assert exact("ab", "b", pattern=r"a(x)?b") == 0  # a group that took no part


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is 31.", 31),
        ("31", "31.0"),
        ("costs $1,234.50", 1234.5),
        ("1,234,567", 1234567),
        ("x = -5", "-5"),
        ("x = −5", -5),
        ("8-5=3", 3),
        ("7-5", 5),  # an operator, not a sign
        ("2e3", 2000),
        (".5", 0.5),
        ("first 7, then 8", "#### 8"),
        ("12345678901234567890123456789", "12345678901234567890123456789"),
    ],
)
def test_numbers_are_found_as_people_write_them(text: str, answer: Any) -> None:
    assert numeric(text, answer) == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("30", 31),
        ("", 31),
        ("thirty-one", 31),
        ("31 or 32", 31),
        ("12345678901234567890123456788", "12345678901234567890123456789"),  # equal as floats
        ("1e999999999", 1),
        ("1e99999999999999999999", 1),
    ],
)
def test_other_numbers_are_wrong(text: str, answer: Any) -> None:
    assert numeric(text, answer) == 0


def test_tolerance_is_a_difference() -> None:
    assert numeric("0.333", 1 / 3) == 0
    assert numeric("0.333", 1 / 3, tolerance=1e-3) == 1
    assert numeric("the answer is <5> of 6", 5, pattern=r"<(.*?)>") == 1


@pytest.mark.parametrize("verifier", [ExactMatch, Numeric])
def test_a_row_without_an_answer_is_a_failure(verifier: type) -> None:
    (score,) = verifier(VerifierConfig(), CONTEXT).score([record("1", solution="1")])
    assert reason(score) == "row 5 has no field 'answer'; it has: solution"


def test_an_answer_that_is_no_number_is_a_failure() -> None:
    (score,) = Numeric(VerifierConfig(), CONTEXT).score([record("1", answer="many")])
    assert reason(score) == "field 'answer' of row 5 holds no number: many"


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="tolerance: must not be negative"):
        VerifierConfig(tolerance=-1)
    with pytest.raises(ConfigError, match=r"pattern: '\(' is not a regular expression"):
        VerifierConfig(pattern="(")


def test_the_config_comes_from_yaml_and_from_the_wire() -> None:
    plain = OmegaConf.to_container(
        OmegaConf.merge(OmegaConf.structured(VerifierConfig), {"tolerance": 0.5})
    )
    assert msgspec.convert(plain, VerifierConfig) == VerifierConfig(tolerance=0.5)
