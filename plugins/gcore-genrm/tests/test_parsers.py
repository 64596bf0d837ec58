"""Parsers: the last score counts, and what is no score is None."""

from __future__ import annotations

from typing import Any

import pytest
from gcore_genrm.config import PairwiseConfig, ParserConfig, PointwiseConfig
from gcore_genrm.parsers import make_reader, make_rubric_reader, on_scale


def read(text: str, **parser: Any) -> float | None:
    return make_reader(ParserConfig(**parser))(text)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7),
        ("score 3, no, wait. **Score:** 8.5/10", 8.5),
        ("Score: -2", -2),
        ("Score:\n\n10", 10),
        ("7", None),
        ("", None),
        ("Score: seven", None),
    ],
)
def test_the_general_template_is_parsed(text: str, score: float | None) -> None:
    assert make_reader(PointwiseConfig().parsed_by())(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Better: A", 1),
        ("better: **b**", 0),
        ("Better: tie", 0.5),
        ("Better: A? Better: B", 0),
        ("A", None),
    ],
)
def test_the_general_comparison_is_parsed(text: str, score: float | None) -> None:
    assert make_reader(PairwiseConfig().parsed_by())(text) == score


@pytest.mark.parametrize(
    "text", ["<s>nan</s>", "<s>inf</s>", "<s>1e999</s>", "<s></s>", "<s>x</s>"]
)
def test_what_is_no_finite_number_is_no_score(text: str) -> None:
    assert read(text, pattern="<s>(?P<score>.*?)</s>") is None


def test_a_group_that_took_no_part_is_no_score() -> None:
    assert read("1 none", pattern=r"(?P<score>\d)|none") is None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 3}', 3),
        ('I say {"score": 3} but then {"score": "4.5", "why": "{"} done', 4.5),
        ('```json\n{"Score": 5}\n```', 5),
        ('{"score": 6} {"other": 1}', 6),
        ('{"a": {"score": 2}}', 2),
        ('{"score": true}', None),
        ('{"score": NaN}', None),
        ('{"score": [1]}', None),
        ('{"score": 3', None),
        ("{" * 3000 + '{"score": 1}', 1),
        ('{"a":' * 3000, None),
    ],
)
def test_a_key_is_looked_up_in_the_last_object_that_has_it(text: str, score: float | None) -> None:
    assert read(text, key="score") == score


def test_choices_are_whole_words_and_the_longest_fits_first() -> None:
    choices = {"good": 1.0, "not good": 0.0, "A+": 2.0}
    assert read("It is not good.", choices=choices) == 0
    assert read("Not good? GOOD!", choices=choices) == 1
    assert read("goodness", choices=choices) is None
    assert read("an A+ then", choices=choices) == 2


def test_a_pattern_or_key_may_find_a_choice() -> None:
    choices = {"y": 1.0, "n": 0.0}
    assert read(":0710182325y", pattern="(?P<score>[a-z])$", choices=choices) == 1
    assert read(":0710182325x", pattern="(?P<score>[a-z])$", choices=choices) is None
    assert read('{"v": " N "}', key="v", choices=choices) == 0
    assert read('{"v": 1}', key="v", choices=choices) is None


def test_a_rubric_needs_every_criterion_in_one_object() -> None:
    parse = make_rubric_reader(ParserConfig(), ["clear", "Short"])
    assert parse('{"clear": 1, "short": 2} {"Clear": 3, "Short": 4, "x": 0} {"clear": 9}') == [3, 4]
    assert parse('{"clear": 1}') is None
    assert parse('{"clear": 1, "short": "very"}') is None


def test_a_rubric_may_be_read_by_a_pattern() -> None:
    parse = make_rubric_reader(
        ParserConfig(pattern=r"(?P<name>\w+): (?P<score>\d+)"), ["clear", "short"]
    )
    assert parse("clear: 1\nShort: 2\nCLEAR: 5") == [5, 2]
    assert parse("clear: 1") is None


def test_a_scale_maps_its_ends_to_0_and_1() -> None:
    assert on_scale(7, [0, 10], clip=False) == pytest.approx(0.7)
    assert on_scale(4, [5, 1], clip=False) == pytest.approx(0.25)
    assert on_scale(85, [0, 10], clip=False) is None
    assert on_scale(85, [0, 10], clip=True) == 1
    assert on_scale(-3, [0, 10], clip=True) == 0
    assert on_scale(85, [], clip=False) == 85


def test_choices_are_taken_as_they_are_unless_a_scale_is_given() -> None:
    choices = ParserConfig(choices={"y": 1.0})
    assert PointwiseConfig().ends == [0, 10]
    assert PointwiseConfig(parser=choices).ends == []
    assert PointwiseConfig(parser=choices, scale=[0.0, 2.0]).ends == [0, 2]
    assert PointwiseConfig(scale=[]).ends == []
