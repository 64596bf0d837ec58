"""``rewards/exact-match`` and ``rewards/numeric``: a right answer is 1 and a wrong one 0, and a row
that cannot be compared is never a 0.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from gcore_rewards.config import CodeConfig, MathConfig, VerifierConfig
from gcore_rewards.verifiers import ExactMatch, Numeric
from omegaconf import OmegaConf

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import Score, ScoredRecord

CONTEXT = WorkerContext(role="scorer")


def record(text: str, **fields: Any) -> ScoredRecord:
    prompt = Prompt(row=5, text="?", fields=fields)
    return ScoredRecord(
        ordinal=1, sample=0, prompt=prompt, text=text, status="finished", columns={}
    )


def reason(score: Score) -> str:
    """The reason of a score that must have failed; it may not carry a number."""
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


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (3.0, ["3", "3.0", " 3 ", "3e0"], ["3.1", "03", "3.", "1,000", "three", ""]),
        (3, ["3", "3.0"], ["4", "true"]),
        (1e-07, ["1e-07", "0.0000001", "1E-7"], ["0", "e-7"]),
        (True, ["true", "True"], ["1", "yes", "false"]),
        (False, ["false"], ["0", "", "null"]),
        ("007", ["007"], ["7", "7.0"]),
        ("3.0", ["3.0"], ["3"]),
        ("true", ["true"], ["True", "1"]),
    ],
)
def test_an_answer_that_is_no_text_is_compared_as_json_says_it(
    answer: Any, right: list[str], wrong: list[str]
) -> None:
    assert [exact(text, answer) for text in right] == [1] * len(right)
    assert [exact(text, answer) for text in wrong] == [0] * len(wrong)


@pytest.mark.parametrize("answer", [None, ["a"], {"a": 1}, float("nan"), float("inf"), []])
def test_a_row_whose_answer_no_text_can_be_is_a_failure_with_its_row(answer: Any) -> None:
    reward = ExactMatch(VerifierConfig(), CONTEXT)
    right, refused = reward.score([record("1", answer="1"), record("1", answer=answer)])
    assert right.value == 1
    assert reason(refused) == (
        f"row 5: field 'answer' is neither a text nor a number nor true or false: {answer}"
    )


@pytest.mark.parametrize("verifier", [ExactMatch, Numeric])
def test_whether_a_rows_answer_can_be_read_is_known_before_there_is_a_completion(
    verifier: type[ExactMatch | Numeric],
) -> None:
    reward = verifier(VerifierConfig(), CONTEXT)
    reward.read_answer(record("", answer="1").prompt)
    for fields in ({"answer": None}, {"answer": [1]}, {"solution": "1"}):
        with pytest.raises(DataError, match="row 5 of the dataset"):
            reward.read_answer(record("", **fields).prompt)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("cafe\u0301", "caf\u00e9"),
        ("New\u00a0York", "New York"),
        ("a\r\nb", "a\nb"),
        ("Par\u200bis\ufeff", "Paris"),
        ("\uff21\uff22\uff17", "AB7"),
        ("\uff76\uff9e", "\u30ac"),
        ("well\u2010known", "well-known"),
        ("\uff15", 5),
    ],
)
def test_exact_match_takes_two_spellings_of_the_same_characters_for_one(
    text: str, answer: Any
) -> None:
    assert exact(text, answer) == 1
    if isinstance(answer, str):
        assert exact(answer, text) == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [("x2", "x\u00b2"), ("1/2", "\u00bd"), ("cafe", "caf\u00e9"), ("a b", "ab"), ("a", "A")],
)
def test_exact_match_keeps_apart_what_looks_different(text: str, answer: str) -> None:
    assert exact(text, answer) == 0
    assert exact(answer, text) == 0


@pytest.mark.parametrize(
    "pattern",
    [r"(final )?answer is (\w+)", r"\\boxed\{(\w+)\}|answer is (\w+)", r"(\d+)(\.\d+)?"],
)
def test_a_pattern_whose_groups_leave_open_what_counts_is_refused(pattern: str) -> None:
    for config in (VerifierConfig, MathConfig, CodeConfig):
        with pytest.raises(ConfigError, match="none is named answer"):
            config(pattern=pattern)


def test_of_several_groups_the_one_named_answer_counts() -> None:
    pattern = r"(final )?answer is (?P<answer>\w+)"
    assert exact("the final answer is 5", "5", pattern=pattern) == 1
    assert exact("the answer is 5", "5", pattern=pattern) == 1
    both = r"\\boxed\{(?P<answer>\w+)\}|answer is (?P<answer>\w+)"
    assert exact(r"\boxed{5}", "5", pattern=both) == 1
    assert exact("the answer is 5", "5", pattern=both) == 1


def test_a_match_in_which_the_group_took_no_part_is_none() -> None:
    pattern = r"answer: (\d+)|unknown"
    assert exact("answer: 5, else unknown", "5", pattern=pattern) == 1
    assert exact("unknown", "", pattern=pattern) == 0


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


@pytest.mark.parametrize(
    "number",
    [
        "1234",
        "1,234",
        "1 234",
        "1\u2009234",
        "1\u00a0234",
        "1\u202f234",
        "1{,}234",
        r"1\,234",
        r"1,\!234",
        r"$1{,}234$",
        r"\boxed{1,234}",
        "1234.0",
        "$1,234.00",
        "2468/2",
        r"\frac{2468}{2}",
        r"$\dfrac{2,468}{2}$",
        "123,400%",
        r"123400\%",
        "1.234e3",
    ],
)
def test_one_number_is_the_same_in_every_way_to_write_it(number: str) -> None:
    """As the row's answer, as the whole completion, and at its end."""
    assert numeric("1234", number) == 1
    assert numeric("1235", number) == 0
    assert numeric(number, 1234) == 1
    assert numeric(number, 1235) == 0
    assert numeric(f"so the answer is {number}.", "1234") == 1


@pytest.mark.parametrize("minus", ["-", "\u2212", "\u2013", "\uff0d", "- ", "\u2212 ", "\u2013 "])
def test_a_minus_is_read_however_it_is_written(minus: str) -> None:
    assert numeric(f"{minus}5", "-5") == 1
    assert numeric("-5", f"{minus}5") == 1
    assert numeric("5", f"{minus}5") == 0
    assert numeric(f"x = {minus}5", "5") == 0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1/2", True),
        ("0.5", True),
        (".5", True),
        (r"\frac{1}{2}", True),
        (r"\frac12", True),
        ("50%", True),
        ("7/2", False),
        (r"\frac{7}{2}", False),
        ("2", False),
        ("1/0", False),
    ],
)
def test_a_fraction_is_compared_by_its_value(text: str, right: bool) -> None:
    assert numeric(text, "1/2") == right
    assert numeric(text, r"\dfrac{1}{2}") == right
    assert numeric(text, 0.5) == right


def test_the_sign_of_a_percentage_may_be_left_out() -> None:
    assert numeric("28 percent", "28%") == 1
    assert numeric("28", "28%") == 1
    assert numeric("0.28", "28%") == 1
    assert numeric("28%", 28) == 1
    assert numeric("2.8", "28%") == 0
    assert numeric("28", 0.28) == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4:30", 30),
        ("(1,2)", 2),
        ("(1, 2)", 2),
        ("x=5, y=2", 2),
        ("so AB=4,CD=5", 5),
        (r"\sqrt{4}", 4),
        (r"the answer is $\sqrt{4}$.", 4),
        (r"\boxed{4\sqrt{2}}", 2),
        ("2^3", 3),
        (r"\log_2 8", 8),
        ("$5!$", 5),
        ("3x", 3),
        ("x_2", 2),
        ("H2O", 2),
        ("12/25/2020", 2020),
        ("1.2.3", 3),
        ("1,00,000", 100000),
        ("0,111", 111),
        ("±5", 5),
        ("x > 5", 5),
        ("1, 2", 2),
        ("$[0,1)$", 1),
        ("3*5", 5),
        ("2 1/2", 0.5),
        ("the price + 5", 5),
        ("7-5", 5),
        ("7-5", -5),
        ("so sqrt(16)", 16),
        ("about 1.5 million", 1.5),
        ("between 10-12", 12),
        ("7 mod 3", 3),
        ("It is not 5", 5),
        ("it was 3, now \u0665", 3),
        ("the price * 5", 5),
        ("the price / 5", 5),
        ("rate^5", 5),
    ],
)
def test_a_completion_that_ends_with_more_than_one_plain_number_is_wrong(
    text: str, answer: Any
) -> None:
    assert numeric(text, answer) == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 3 = 5, 5 * 2 = 10", 10),
        ("With a = 3, b = 4 we get 5", 5),
        ("We get (2 + 3 = 5).", 5),
        ("The answer is **5**", 5),
        ("<answer>5</answer>", 5),
        ("\\[ \n 9 \n \\]", 9),
        (r"$x = \boxed{\frac{7}{2}}$.", 3.5),
        (r"$5 \text{ cm}$", 5),
        ("it takes 5 s", 5),
        ("step-5", 5),
        ("That is $28$ %.", "28%"),
        ("9 * 2 = $<<9*2=18>>18 every day", 18),
        ("5<|end|>", 5),
        ("it is 5 (five)", 5),
        ("half of it (the total) 5", 5),
        ("half, i.e., 1/2", 0.5),
        ("(B) 5", 5),
        ("the answer—5", 5),
        ("about ~5…", 5),
        (r"x &= 5 \\", 5),
        (r"\boxed{18\text{ eggs}}", 18),
        (r"\boxed{\$18}", 18),
    ],
)
def test_words_and_working_around_the_last_number_do_no_harm(text: str, answer: Any) -> None:
    assert numeric(text, answer) == 1


def test_a_long_completion_is_read_in_no_time() -> None:
    for text in ("(" * 100_000, "9" * 100_000, "a_" * 50_000 + "=1", "- " * 50_000, "9 " * 50_000):
        began_s = time.perf_counter()
        assert numeric(f"{text}5", 5) in (0, 1)
        assert time.perf_counter() - began_s < 1


def test_tolerance_is_a_difference() -> None:
    assert numeric("0.333", 1 / 3) == 0
    assert numeric("0.333", 1 / 3, tolerance=1e-3) == 1
    assert numeric("the answer is <5> of 6", 5, pattern=r"<(.*?)>") == 1


@pytest.mark.parametrize("verifier", [ExactMatch, Numeric])
def test_a_row_without_an_answer_is_a_failure(verifier: type) -> None:
    (score,) = verifier(VerifierConfig(), CONTEXT).score([record("1", solution="1")])
    assert reason(score) == "row 5 has no field 'answer'; it has: solution"


@pytest.mark.parametrize(
    "answer",
    [
        "many",
        "4:30",
        "(1,2)",
        "x=1, y=2",
        r"\sqrt{4}",
        "1, 2",
        "1,00,000",
        "5 apples",
        "2^3",
        "1/0",
        "inf",
        True,
        None,
        float("nan"),
        [5],
        "",
        "1,5",
        "1_000",
        "1.5 million",
        "10-12",
        "0x1F",
        "\u0665",
    ],
)
def test_a_row_whose_answer_is_not_one_plain_number_is_refused(answer: Any) -> None:
    numeric_reward = Numeric(VerifierConfig(), CONTEXT)
    with pytest.raises(DataError) as caught:
        numeric_reward.score([record("1", answer=1), record("1", answer=answer)])
    assert str(caught.value).splitlines() == [
        f"row 5 of the dataset: field 'answer' is not one plain number: {answer}",
        "  rewards/numeric compares numbers such as 42, -1.5, 7/2, 30% or 1,234",
        "  correct or drop the row, or compare with rewards/math (expressions) or "
        "rewards/exact-match (text)",
    ]


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="tolerance: must not be negative"):
        VerifierConfig(tolerance=-1)
    with pytest.raises(ConfigError, match="tolerance: must be finite"):
        VerifierConfig(tolerance=float("inf"))
    with pytest.raises(ConfigError, match=r"pattern: '\(' is not a regular expression"):
        VerifierConfig(pattern="(")
    with pytest.raises(ConfigError, match="pattern_s: must be positive"):
        VerifierConfig(pattern_s=0)


@pytest.mark.parametrize("reward", [ExactMatch, Numeric])
def test_a_pattern_that_backtracks_without_end_times_out_and_the_next_record_is_scored(
    reward: type[ExactMatch | Numeric],
) -> None:
    scorer = reward(VerifierConfig(pattern="((?:1|11)+)$", pattern_s=0.05), CONTEXT)
    began_s = time.process_time()
    slow, quick = scorer.score([record("1" * 64 + "x", answer=1), record("so 1", answer=1)])
    assert time.process_time() - began_s < 1
    assert (slow.value, slow.status) == (None, "timeout")
    assert slow.reason == "the pattern took longer than 0.05 s: '((?:1|11)+)$'"
    assert quick.value == 1


def test_the_config_comes_from_yaml_and_from_the_wire() -> None:
    plain = OmegaConf.to_container(
        OmegaConf.merge(OmegaConf.structured(VerifierConfig), {"tolerance": 0.5})
    )
    assert msgspec.convert(plain, VerifierConfig) == VerifierConfig(tolerance=0.5)
