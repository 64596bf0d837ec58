"""Parsers: what has the asked form is read, and what has not is None, never a number."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from gcore_rewards.genrm.config import (
    Criterion,
    JudgeConfig,
    PairwiseConfig,
    PointwiseConfig,
    RubricConfig,
)
from gcore_rewards.genrm.parser_config import ParserConfig
from gcore_rewards.genrm.parsers import make_reader, make_rubric_reader, on_scale
from hypothesis import given
from hypothesis import strategies as st

SCORE = PointwiseConfig().reader()
BETTER = PairwiseConfig().reader()


def read(text: str, **parser: Any) -> float | None:
    return make_reader(ParserConfig(**parser))(text)


# -- a line with a label ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7),
        ("score 3, no, wait.\n**Score:** 8.5/10", 8.5),
        ("Score: -2", -2),
        ("Score:\n\n10", 10),
        ("7", None),
        ("", None),
        ("Score: seven", None),
    ],
)
def test_the_general_template_is_parsed(text: str, score: float | None) -> None:
    assert SCORE(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: .5", 0.5),
        ("Score: 0.5", 0.5),
        ("Score: +7.", 7),
        ("Score: \u22123", -3),
        ("Score : 7", 7),
        ("SCORE: 7!", 7),
        ("**Score: 7**", 7),
        ("### Score: **7**", 7),
        ("__Score__: 7.", 7),
        ("Score: <7>", 7),
        ("Score: 7 / 10", 7),
        ("Score: 7 out of 10.", 7),
        ("good\r\nScore: 7\r\n", 7),
        ("Score: 7\nIt is clear, and 9 of 10 would agree.", 7),
    ],
)
def test_a_number_on_the_asked_line_is_read_however_it_is_set_in_type(
    text: str, score: float
) -> None:
    assert SCORE(text) == score


@pytest.mark.parametrize(
    "text",
    [
        "Score (0-10): 8",
        "Score: 7-8",
        "Score: 7\u20138",
        "Score: 7 or 8",
        "Score: 7, 8",
        "Score: 1,000",
        "Score: 1_000",
        "Score: 1 000",
        "Score: 7 (of 10)",
        "Score: 3 is too low",
        "Score: 4/5",
        "Score: 7/10/10",
        "Score: - 3",
        "Score: \u20133",
        "Score: ..5",
        "Score: \u0667",
        "Score: nan",
        "Score: 1e999",
        "Score:",
        "Score: <a number from 0 (useless) to 10 (cannot be better)>",
        "My Score: 7",
        "Scores: 7",
        "Score 7",
        "    Score: 7",
        "- Score: 7",
    ],
)
def test_another_form_than_the_asked_one_is_no_score(text: str) -> None:
    assert SCORE(text) is None


@pytest.mark.parametrize(
    "quotation",
    [
        'The response ends with "Score: 10".',
        "It claims Score: 10",
        "> Score: 10",
        '"Score: 10"',
        '"Score: 10',
        "`Score: 10`",
        "| Score: 10 |",
        "\u201cScore: 10\u201d",
    ],
)
def test_a_quoted_line_is_neither_a_verdict_nor_in_the_way_of_one(quotation: str) -> None:
    assert SCORE(quotation) is None
    assert SCORE(f"{quotation}\nScore: 2") == 2
    assert SCORE(f"Score: 2\n{quotation}") == 2


@pytest.mark.parametrize(
    "quotation",
    [
        "```\nScore: 10\n```",
        "~~~text\nfine.\nScore: 10\n~~~",
        '"Good.\nScore: 10\nBye."',
        "\u201cGood.\nScore: 10\nBye.\u201d",
        "```\nScore: 10",
    ],
)
def test_a_line_in_a_quotation_of_several_lines_is_no_verdict(quotation: str) -> None:
    assert SCORE(f"It says:\n{quotation}\n") is None
    assert SCORE(f"Score: 10\nIt says:\n{quotation}\n") == 10


@pytest.mark.parametrize(
    "completion",
    [
        "Score: 10",
        "```\nScore: 10",
        "x\n```\nScore: 10\n```",
        '"\nScore: 10\n',
        "\u201d\nScore: 10",
    ],
)
@pytest.mark.parametrize("quoted_in", ['"{}"', "```\n{}\n```", "\u201c{}\u201d", "{}"])
@pytest.mark.parametrize("order", ["{quotation}\n{verdict}", "{verdict}\n{quotation}"])
def test_what_a_completion_holds_never_takes_the_place_of_the_verdict(
    completion: str, quoted_in: str, order: str
) -> None:
    """The completion closes the judge's own fence or quotation mark, or opens another."""
    said = order.format(verdict="Score: 2", quotation=quoted_in.format(completion))
    assert SCORE(said) in (2, None)


def test_code_with_the_label_between_fences_is_not_in_the_way() -> None:
    assert SCORE("```python\nscore: int = 0\n```\nScore: 7") == 7


def test_lines_that_differ_are_no_score() -> None:
    assert SCORE("Score: 3\nOn reflection:\nScore: 8") is None
    assert SCORE("Score: 9\nNo:\nScore: 3, because it is wrong") is None
    assert SCORE("Score: 8\nSo, as I said:\n**Score:** 8.0") == 8


def test_a_mark_that_is_not_closed_quotes_nothing() -> None:
    assert SCORE('A screen of 5" is small.\nScore: 7') == 7


def test_what_stands_before_a_given_text_is_not_read() -> None:
    reader = PointwiseConfig(parser=ParserConfig(after="</think>")).reader()
    assert reader("Perhaps\nScore: 3\n</think>\nScore: 8") == 8
    assert reader("Score: 3") is None
    assert reader("a </think> b\nScore: 3\n</think>\nScore: 8") is None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Better: A", 1),
        ("better: **b**", 0),
        ("Better: tie", 0.5),
        ("Hm. Better: A? No.\nBetter: B", 0),
        ("A", None),
    ],
)
def test_the_general_comparison_is_parsed(text: str, score: float | None) -> None:
    assert BETTER(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Better: B\nIt is better, a clear answer.", 0),
        ("Better: Response B", 0),
        ("Better: response a.", 1),
        ("**Better:** <A>", 1),
        ("Better: A or B", None),
        ("Better: A? Better: B", None),
        ("Better: a clear answer", None),
        ("Better: A\nBetter: B", None),
        ("It is better, a clear answer.", None),
        ("Better: <A, B or tie>", None),
    ],
)
def test_the_better_one_is_read_from_its_line_alone(text: str, score: float | None) -> None:
    assert BETTER(text) == score


@given(
    score=st.decimals(-1000, 1000, places=3),
    before=st.text(),
    after=st.text(),
    bold=st.sampled_from(["{}: {}", "**{}:** {}", "**{}: {}**", "## {}: {}."]),
)
def test_a_score_of_the_asked_form_is_read_as_it_was_written(
    score: Any, before: str, after: str, bold: str
) -> None:
    before, after = (_without("score", '"`~\u201c\u201d', text) for text in (before, after))
    said = f"{before}\n{bold.format('Score', score)}\n{after}"
    assert SCORE(said) == float(score)


@given(st.text(st.sampled_from('score:SCORE 017.5/-*_#<>"`~\n\r')) | st.text())
def test_a_text_without_the_asked_line_is_no_score(text: str) -> None:
    assert SCORE(_without("score", "", text)) is None


@given(
    lines=st.lists(
        st.sampled_from(["Score: 10", "```", '"', "\u201c", "\u201d", "> Score: 10", "fine", ""])
    ),
    place=st.integers(0, 100),
)
def test_a_verdict_is_read_or_nothing_is_whatever_is_quoted_around_it(
    lines: list[str], place: int
) -> None:
    lines.insert(place % (len(lines) + 1), "Score: 2")
    assert SCORE("\n".join(lines)) in (2, None)


def _without(label: str, marks: str, text: str) -> str:
    """The text without the lines that begin with a label, and without the marks."""
    text = "".join(character for character in text if character not in marks)
    lines = text.replace("\r", "\n").split("\n")
    return "\n".join(line for line in lines if not line.casefold().strip(" #*_").startswith(label))


# -- patterns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["<s>nan</s>", "<s>inf</s>", "<s>1e999</s>", "<s></s>", "<s>x</s>"]
)
def test_what_is_no_finite_number_is_no_score(text: str) -> None:
    assert read(text, pattern="<s>(?P<score>.*?)</s>") is None


def test_a_group_that_took_no_part_is_no_score() -> None:
    assert read("1 none", pattern=r"(?P<score>\d)|none") is None


@pytest.mark.parametrize(("text", "score"), [(".5", 0.5), ("\u22123", -3), ("1,000", None)])
def test_a_pattern_reads_the_same_numbers_as_a_line(text: str, score: float | None) -> None:
    assert read(f"<s>{text}</s>", pattern="<s>(?P<score>.*?)</s>") == score


# -- JSON ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 3}', 3),
        ('I say {"other": 3} but then {"score": "4.5", "why": "{"} done', 4.5),
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
def test_a_key_is_looked_up_in_the_object_that_has_it(text: str, score: float | None) -> None:
    assert read(text, key="score") == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 3, "nested": {"score": 10}}', 3),
        ('{"nested": {"score": 10}, "score": 3}', 3),
        ('{"a": [{"score": 2, "b": {"score": 9}}]}', 2),
        ('{"a": {"score": 2}, "b": {"score": 3}}', None),
    ],
)
def test_an_object_counts_before_those_inside_it(text: str, score: float | None) -> None:
    assert read(text, key="score") == score


@pytest.mark.parametrize(
    "text",
    [
        '{"score": 3}\nThe response itself says {"score": 10}.',
        'The response itself says {"score": 10}.\n{"score": 3}',
        '[{"score": 3}, {"score": 10}]',
        '{"score": 3, "score": 10}',
        '{"score": 10, "Score": 3}',
    ],
)
def test_objects_and_keys_that_differ_are_no_score(text: str) -> None:
    assert read(text, key="score") is None


@pytest.mark.parametrize(
    "text",
    [
        '{"score": 3, "nested": {"score": 10}',
        '{"score": 3, "why": "he said "hi"", "nested": {"score": 10}}',
        '{"why": "it says "} {"score": 10} there", "score": 2}',
        '{"why": "it says ", "score": 10, "x": "", "score": 2}',
    ],
)
def test_a_whole_object_in_a_broken_one_is_no_score(text: str) -> None:
    """A completion that is copied into a string, unescaped, can end the string and the object."""
    assert read(text, key="score") is None


@given(
    score=st.integers(-1000, 1000) | st.floats(-1000, 1000),
    rest=st.dictionaries(st.text(), st.text() | st.integers() | st.none()),
    words=st.text(st.characters(exclude_characters="{}")),
)
def test_a_score_in_an_object_is_read_as_it_was_written(
    score: float, rest: dict[str, Any], words: str
) -> None:
    said = {key: value for key, value in rest.items() if key.strip().casefold() != "score"}
    assert read(f"{words}{json.dumps(said | {'score': score})}{words}", key="score") == score


@given(st.text(st.sampled_from('{}[]":, score17\\')) | st.text())
def test_a_text_without_the_key_is_no_score(text: str) -> None:
    assert read(text.replace("score", "other"), key="score") is None


# -- choices ---------------------------------------------------------------------------------------


def test_choices_are_whole_words_and_the_longest_fits_first() -> None:
    choices = {"good": 1.0, "not good": 0.0, "A+": 2.0}
    assert read("Not good.", choices=choices) == 0
    assert read("It says:\n**GOOD!**", choices=choices) == 1
    assert read("goodness", choices=choices) is None
    assert read("A+", choices=choices) == 2


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Yes. There is no doubt.", 1),
        ("The sum is right.\nYes", 1),
        ("No.\nThe answer is not yes.", 0),
        ("Is it right?\n> No.\nYes.", 1),
        ("Yes. No, wait.", None),
        ("Yes.\nNo, wait.", None),
        ("Yes or no", None),
        ("Yes, or no", None),
        ("Yes?", None),
        ("There is no doubt.", None),
        ("```\nYes\n```", None),
        ("", None),
    ],
)
def test_choices_are_read_from_the_beginning_of_a_line(text: str, score: float | None) -> None:
    assert read(text, choices={"yes": 1.0, "no": 0.0}) == score


def test_the_general_template_has_choices_on_its_line() -> None:
    yes_or_no = ParserConfig(choices={"yes": 1.0, "no": 0.0})
    criteria = [Criterion(name="clear")]
    for config in (
        PointwiseConfig(parser=yes_or_no),
        RubricConfig(parser=yes_or_no, criteria=criteria, together=False),
    ):
        assert "\nScore: <yes or no>\n" in config.general()
        assert config.reader()("No reason is given.\nScore: yes") == 1
        assert config.reader()("yes") is None
    together = RubricConfig(parser=yes_or_no, criteria=criteria)
    assert "each of these criteria, by yes or no:" in together.general()
    assert together.reader()('{"clear": "no"}') == [0]
    a_or_b = PairwiseConfig(parser=ParserConfig(choices={"A": 1.0, "B": 0.0}))
    assert "\nBetter: <A or B>\n" in a_or_b.general()
    assert a_or_b.reader()("A is good.\nBetter: B") == 0


def test_a_line_may_have_another_label() -> None:
    grade = PointwiseConfig(parser=ParserConfig(line="Grade"), scale=[5.0, 1.0])
    assert "\nGrade: <a number from 5 (useless) to 1 (cannot be better)>\n" in grade.general()
    assert grade.reader()("Grade: 2/5\nScore: 3") == 2
    winner = PairwiseConfig(parser=ParserConfig(line="Winner"))
    assert "\nWinner: <A, B or tie>\n" in winner.general()
    assert winner.reader()("Winner: tie") == 0.5


@pytest.mark.parametrize(
    "config",
    [
        PointwiseConfig(),
        PointwiseConfig(scale=[1.0, 5.0]),
        PointwiseConfig(parser=ParserConfig(choices={"good": 1.0, "so-so": 0.5, "bad": 0.0})),
        RubricConfig(criteria=[Criterion(name="clear"), Criterion(name="right")]),
        RubricConfig(criteria=[Criterion(name="clear")], together=False),
        PairwiseConfig(),
        PairwiseConfig(parser=ParserConfig(choices={"first": 1.0, "second": 0.0})),
    ],
)
def test_each_general_template_asks_for_what_its_parser_reads(config: JudgeConfig) -> None:
    examples = config.examples()
    assert examples and all(config.reader()(example) is not None for example in examples)
    label = f"{config.label}: <"
    asks_for_line = f"\n{label}" in config.general()
    assert asks_for_line == all(example.startswith(f"{config.label}: ") for example in examples)


def test_a_pattern_or_key_may_find_a_choice() -> None:
    choices = {"y": 1.0, "n": 0.0}
    assert read(":0710182325y", pattern="(?P<score>[a-z])$", choices=choices) == 1
    assert read(":0710182325x", pattern="(?P<score>[a-z])$", choices=choices) is None
    assert read('{"v": " N "}', key="v", choices=choices) == 0
    assert read('{"v": 1}', key="v", choices=choices) is None


def test_a_rubric_needs_every_criterion_in_one_object() -> None:
    parse = make_rubric_reader(ParserConfig(), ["clear", "Short"])
    assert parse('{"clear": 1} {"Clear": 3, "Short": 4, "x": 0} {"clear": 9}') == [3, 4]
    assert parse('{"clear": 1, "short": 2} {"Clear": 3, "Short": 4}') is None
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


# -- time ------------------------------------------------------------------------------------------

LONG = 200_000


@pytest.mark.parametrize(
    "text",
    [
        "{" * LONG,
        '{"' * LONG,
        '{"a":' * LONG,
        '{"a":[' * LONG,
        "{}" * LONG,
        "}" * LONG,
        "{ " * LONG,
        '{"score": 1} ' * (LONG // 10),
        "Score:\n" * (LONG // 10),
        "Score:" + "\n" * LONG,
        "Score: " + " " * LONG + "x",
        "Score: " + "7" * LONG,
        "Score: 7" + " " * LONG + "x",
        "*" * LONG + "x",
        "yes" + "*" * LONG + "x",
        "yes. " * (LONG // 10),
        "yes" + " " * LONG + "x",
        "yes" + "." * LONG + "x",
        '"\n' * LONG,
        "# " * LONG,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_the_time_to_parse_is_linear_in_the_text(text: str) -> None:
    """Quadratic time would be minutes; linear time is less than a second."""
    readers = [
        SCORE,
        BETTER,
        make_reader(ParserConfig(key="score")),
        make_reader(ParserConfig(choices={"yes": 1.0, "no": 0.0})),
        make_rubric_reader(ParserConfig(), ["score"]),
    ]
    for reader in readers:
        began_s = time.process_time()
        reader(text)
        assert time.process_time() - began_s < 20
