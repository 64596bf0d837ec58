"""Numbers in texts: each spelling is the number that it says, or none; never another one.

``number_spellings.jsonl`` has a spelling a line: its kind, the text, the number that is right, as a
fraction and with its percent sign, or null; and whether the text is nothing but that number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from gcore_rewards.answers import boxes, last_box, last_number, number_within, only_number
from gcore_rewards.numbers import Number, decimal_of, number_of, plain_characters
from hypothesis import given
from hypothesis import strategies as st

SPELLINGS = [
    json.loads(line)
    for line in Path(__file__)
    .with_name("number_spellings.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]


def said(number: Number | None) -> str | None:
    return None if number is None else f"{number.value}{'%' if number.is_percent else ''}"


def test_every_spelling_is_its_number_at_the_end_of_a_text_or_none() -> None:
    assert len(SPELLINGS) > 800
    wrong = [s for s in SPELLINGS if said(last_number(s["text"])) != s["right"]]
    assert wrong == []


def test_every_spelling_is_its_number_as_a_rows_answer_or_none() -> None:
    """A number with words around it is no answer of a row."""
    right = {s["text"]: (s["right"],) if s["alone"] else (s["right"], None) for s in SPELLINGS}
    assert {text for text, may_be in right.items() if said(number_of(text)) not in may_be} == set()


@pytest.mark.parametrize(
    "sentence", ["{}.", "The answer is {}", "So it is {}.", "**Answer:** {}", "x = {}", "3\n{}\n"]
)
def test_prose_around_a_number_does_not_change_it(sentence: str) -> None:
    wrong = {
        text: said(found)
        for s in SPELLINGS
        if s["alone"] and (text := s["text"].strip()) and not text.startswith(("+", "."))
        if not re.match(r"[-\u2212] |^\d+\.$", text)  # may be an operator, or an item of a list
        if said(found := last_number(sentence.format(text))) != s["right"]
    }
    assert wrong == {}


def test_the_text_of_a_number_says_the_same_number_to_other_readers() -> None:
    for spelling in SPELLINGS:
        number = last_number(spelling["text"])
        if number is None:
            continue
        again = number_of(number.text)
        assert said(again) == spelling["right"]
        if not re.search(r"[\\/½-¾⅐-⅞%]", number.text):
            assert Fraction(number.text) == number.value
        assert said(number_of(f"${number.latex()}$")) == spelling["right"]


@given(st.integers(-(10**40), 10**40), st.integers(0, 12))
def test_every_decimal_is_read_exactly(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    padded = str(abs(digits)).zfill(places + 1)
    whole, rest = padded[: len(padded) - places], padded[len(padded) - places :]
    text = f"{'-' if digits < 0 else ''}{whole}{'.' if rest else ''}{rest}"
    for written in (text, text.replace("-", "\u2212"), f"It is ${text}$.", f"x = {text}"):
        number = last_number(written)
        assert number is not None and number.value == value
    assert number_of(text) == last_number(text)


@given(st.text(alphabet="0123456789.,'+-*/%$^_=()[]{}\\ ~abcexkmn½²√≥:;!?\n", max_size=24))
def test_what_is_read_of_any_text_stands_there_digit_by_digit(text: str) -> None:
    number = last_number(text)
    if number is None:
        return
    digits = re.sub(r"[^0-9]", "", re.sub(r"½", "", number.text))
    assert re.sub(r"[^0-9]", "", re.sub(r"½", "", text)).endswith(digits) or "e" in number.text


@pytest.mark.parametrize(
    ("value", "right"),
    [
        (3, "3"),
        (3.0, "3"),
        (0.1, "1/10"),
        (1e-07, "1/10000000"),
        (-1.5e300, str(Fraction("-1.5e300"))),
        (Decimal("3.50"), "7/2"),
        (True, None),
        (False, None),
        (None, None),
        (math.nan, None),
        (math.inf, None),
        ([5], None),
        ({"a": 5}, None),
        (b"5", None),
        pytest.param(10**5000, None, id="5001 digits"),
    ],
)
def test_a_value_of_a_row_is_the_number_that_json_says(value: object, right: str | None) -> None:
    assert said(number_of(value)) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("7", "7"),
        ("-2", "-2"),
        ("\u22123", "-3"),
        (".5", "1/2"),
        ("+7.", "7"),
        ("1e-3", "1/1000"),
        (" 7 ", "7"),
        ("1,000", None),
        ("1_000", None),
        ("1 000", None),
        ("7/10", None),
        ("50%", None),
        ("$5", None),
        ("\u20133", None),
        ("- 3", None),
        ("\u0667", None),
        ("nan", None),
        ("inf", None),
        ("1e99999", None),
        ("0x1F", None),
        ("", None),
    ],
)
def test_a_form_asks_for_digits_a_point_and_a_sign(text: str, right: str | None) -> None:
    value = decimal_of(text)
    assert (None if value is None else str(value)) == right


def near(text: str, expected: str, tolerance: str = "1e-6") -> bool:
    numbers = number_of(text), number_of(expected)
    assert numbers[0] is not None and numbers[1] is not None
    return numbers[0].is_near(numbers[1], Fraction(tolerance))


def test_numbers_are_near_by_the_tolerance_and_a_tiny_one_by_its_share() -> None:
    assert near("0.333333", "1/3") and not near("0.33", "1/3")
    assert near("0.0000001", "1e-07") and not near("0", "1e-07") and not near("2e-7", "1e-07")
    assert near("0", "0") and near("1e-9", "0")
    assert near("31", "30", "1") and not near("32", "30", "1")


def test_a_percentage_is_near_its_share_and_its_number_without_the_sign() -> None:
    assert near("50%", "0.5") and near("0.5", "50%") and near("50", "50%") and near("50%", "50")
    assert not near("0.5", "50") and not near("5%", "0.5")


def test_half_a_percent_is_no_half_and_a_number_of_at_most_one_is_a_share() -> None:
    for text, expected in (("0.5%", "0.5"), ("0.5", "0.5%"), ("1%", "1"), ("-0.5%", "-0.5")):
        assert not near(text, expected)
    assert near("0.5%", "0.005") and near("0.5%", "0.5%") and near("100%", "1") and near("0%", "0")
    assert near("2.5%", "2.5")


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("1e-07", "0.0000001"),
        ("1/3", r"\frac{1}{3}"),
        ("-2 1/2", "-2.5"),
        ("½", "0.5"),
        ("1,234", "1234"),
        ("50%", r"50\%"),
        ("10/5", "2"),
    ],
)
def test_a_number_is_written_for_latex(text: str, latex: str) -> None:
    number = number_of(text)
    assert number is not None and number.latex() == latex


def contents(text: str) -> list[str | None]:
    return [box.content for box in boxes(text)]


def test_boxes_are_found_with_braces_in_them_and_boxes_in_boxes_are_one() -> None:
    assert contents(r"\boxed{1} and \fbox{\frac{1}{2}}, \boxed {3}") == ["1", r"\frac{1}{2}", "3"]
    assert contents(r"\boxed{\boxed{5} + 1}") == ["5 + 1"]
    assert contents(r"\boxed{\{1, 2\}}") == [r"\{1, 2\}"]
    assert contents(r"\boxed{}") == [""]
    assert contents("none {} \\boxed 5") == []


def test_a_box_that_is_not_closed_has_no_content_and_hides_no_later_one() -> None:
    assert contents(r"\boxed{1} so \boxed{12") == ["1", None]
    assert contents(r"\boxed{ and \boxed{5}") == [None, "5"]
    box = last_box(r"\boxed{1} so \boxed{12")
    assert box is not None and box.content is None


@pytest.mark.parametrize("word", ["xyzzy", "qwert", "фыва", "minusz", "ennek"])
def test_a_word_of_an_unknown_language_before_a_number_leaves_none(word: str) -> None:
    assert last_number(f"{word} 5") is None
    assert last_number(f"3 {word} 5") is None


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("5 apples", "5"),
        ("x = 5", "5"),
        ("x = 2 + 3 = 5", "5"),
        (r"20\text{ cm}^2", "20"),
        ("2 apples and 5 pears", None),
        ("5 million", None),
        ("(2, 5)", None),
    ],
)
def test_the_one_number_of_a_short_text_is_read(text: str, right: str | None) -> None:
    assert said(only_number(text)) == right


def test_a_number_in_the_middle_of_a_text_is_read_by_what_stands_around_it() -> None:
    text = plain_characters("It is 5, not 6, and never sqrt(16).")
    assert said(number_within(text, 0, 8)) == "5"
    assert said(number_within(text, 0, 15)) is None  # "not 6"
    text = plain_characters("It is 5. I took 3 steps.")
    assert said(number_within(text, 6, 7)) == "5"
    assert said(number_within(text, 0, len(text))) == "3"


def long_texts() -> Iterator[str]:
    for part in ("(", "9", "a_", "- ", "9 ", "1,234,", r"\boxed{", "{", "x=1,", " ", r"\frac{"):
        yield part * (100_000 // len(part))
    for part in ("not ", "between ", "5 and ", r"\text{a", "$", "*", "<a", ".", "1/", "10^", "'"):
        yield part * (100_000 // len(part))
    yield r"\boxed{" * 10_000 + "5" + "}" * 10_000


def test_a_long_text_is_read_in_time_that_grows_with_its_length() -> None:
    """A search that backtracks would not come to its end."""
    for text in long_texts():
        for whole in (text, f"{text}5", f"5{text}"):
            last_number(whole)
            number_of(whole)
            boxes(whole)
