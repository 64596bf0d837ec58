"""Templates and settings: what cannot work is refused before the run, in words that say what to
do.
"""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_rewards.genrm.config import (
    Criterion,
    JudgeConfig,
    PairwiseConfig,
    PointwiseConfig,
    RubricConfig,
)
from gcore_rewards.genrm.templates import MissingField, Template, text_of
from omegaconf import OmegaConf

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.records import Prompt

PLACES = frozenset({"prompt", "completion"})


def filled(text: str, fields: dict[str, Any] | None = None, completion: str = "C") -> str:
    return Template(text, PLACES, "template").fill(
        {"prompt": "P", "completion": completion}, fields or {}
    )


# -- templates -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("{prompt} -> {completion}", "P -> C"),
        ("{fields[answer]}, {fields[the source]}", 'a{x}, {"page": 3}'),
        ('{"score": 7, "why": {}}', '{"score": 7, "why": {}}'),
        ("{{completion}} {{fields[x]}}", "{completion} {fields[x]}"),
        ("a { b } {} {0.x} {completion.__class__} {prompt!r} {prompt:>9}", None),
    ],
)
def test_only_words_in_braces_are_places(text: str, result: str | None) -> None:
    fields = {"answer": "a{x}", "the source": {"page": 3}}
    assert filled(text, fields) == (text if result is None else result)


def test_what_is_filled_in_is_not_read_as_a_template() -> None:
    assert filled(
        "{completion}", {"secret": "s"}, completion="{prompt} {fields[secret]} {{x}}"
    ) == ("{prompt} {fields[secret]} {{x}}")


def test_a_field_that_the_row_lacks_is_named_in_the_error() -> None:
    with pytest.raises(MissingField, match="no field 'answer'; the row has: source, page"):
        filled("{fields[answer]}", {"source": 1, "page": 2})


def test_a_judge_is_never_asked_about_a_field_that_is_null() -> None:
    with pytest.raises(MissingField, match="field 'answer' is null"):
        filled("{fields[answer]}", {"answer": None})


@pytest.mark.parametrize("value", [b"2", [b"2"], datetime.date(2026, 11, 28), {1: 2}, math.nan])
def test_a_field_for_which_json_has_no_word_is_not_shown_as_python_writes_it(value: Any) -> None:
    with pytest.raises(MissingField, match="field 'answer' cannot be shown: "):
        filled("{fields[answer]}", {"answer": value})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{compeltion}", "template: {compeltion} is unknown (did you mean 'completion'?)."),
        (r"\frac{a}{b}", "template: {a} is unknown."),
        ("{fields}", "{fields} needs the name of a field"),
        ("{prompt[0]}", "{prompt[0]} is unknown"),
    ],
)
def test_an_unknown_place_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Template(text, PLACES, "template")
    assert said in str(caught.value)


def test_the_error_of_an_unknown_place_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        Template("{answer}", PLACES, "template")
    assert str(caught.value).splitlines()[1:] == [
        "  there are: {completion}, {prompt} and {fields[<name>]}",
        "  if it is meant as it stands, double the braces: {{answer}}",
    ]


def test_a_chat_is_judged_as_text() -> None:
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
    ]
    assert text_of(Prompt(row=0, messages=turns)) == "<image>\nwhat is it?"
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    assert text_of(Prompt(row=0, messages=turns)) == "system: be brief\nuser: 2+2?"


def test_a_judge_reads_the_calls_of_a_chat() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    for content in (None, ""):
        turns = [
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "5"},
        ]
        said = f"assistant: {json.dumps([call])}\ntool: 5"
        assert text_of(Prompt(row=0, messages=turns)) == said
    turns = [{"role": "assistant", "content": "let me add", "tool_calls": [call]}]
    assert text_of(Prompt(row=0, messages=turns)) == f"let me add\n{json.dumps([call])}"


# -- settings --------------------------------------------------------------------------------------

RUBRIC: dict[str, Any] = {"criteria": [{"name": "clear"}]}


@pytest.mark.parametrize(
    ("cls", "wrong", "said"),
    [
        (
            PointwiseConfig,
            {"template": "Is {prompt} right?"},
            "template: the template does not use {completion}.",
        ),
        (PointwiseConfig, {"template": "{completion} {answer}"}, "template: {answer} is unknown"),
        (
            PointwiseConfig,
            {"messages": [{"content": "rate"}]},
            "messages: the template does not use {completion}",
        ),
        (
            PointwiseConfig,
            {"messages": [{"content": "{x}"}]},
            "messages[0].content: {x} is unknown",
        ),
        (PointwiseConfig, {"system": "{x}"}, "system: {x} is unknown"),
        (PointwiseConfig, {"path": "/nowhere.txt"}, "path: the template cannot be read"),
        (
            PointwiseConfig,
            {"path": "a", "template": "b"},
            "path: template and path are set; give one of them",
        ),
        (PointwiseConfig, {"form": "text", "system": "be strict"}, "form: text has no turns"),
        (
            PointwiseConfig,
            {"system": "a", "messages": [{"content": "{completion}"}]},
            "system: make it the first",
        ),
        (
            PointwiseConfig,
            {"images": ["image"], "template": "{completion}"},
            "template does not use {image}",
        ),
        (
            PointwiseConfig,
            {"images": ["image"], "template": "{imag}"},
            "{imag} is unknown (did you mean 'image'?)",
        ),
        (PointwiseConfig, {"template": "{completion} {image}"}, "template: {image} is unknown"),
        (
            PointwiseConfig,
            {"images": ["image"] * 2, "template": "{image}"},
            "images: must differ: image, image",
        ),
        (PointwiseConfig, {"images": ["prompt"]}, "images: 'prompt' cannot be the name of a place"),
        (
            PointwiseConfig,
            {"images": ["an image"]},
            "images: 'an image' cannot be the name of a place",
        ),
        (
            PointwiseConfig,
            {"images": ["image"], "form": "text"},
            "form: text has no places for images; use chat",
        ),
        (
            RubricConfig,
            {**RUBRIC, "images": ["x"], "template": "{x}"},
            "the template does not use {criteria}",
        ),
        (
            PairwiseConfig,
            {"images": ["x"], "template": "{first_x}"},
            "the template does not use {second_x}",
        ),
        (
            PointwiseConfig,
            {"completion_pattern": "("},
            "completion_pattern: '(' is not a regular expression",
        ),
        (
            PointwiseConfig,
            {"parser": {"pattern": "("}},
            "parser.pattern: '(' is not a regular expression",
        ),
        (
            PointwiseConfig,
            {"parser": {"pattern": r"(\d)"}},
            "parser.pattern: has no group (?P<score>...)",
        ),
        (
            PointwiseConfig,
            {"parser": {"pattern": "(?P<score>.)", "key": "score"}},
            "parser: takes a pattern or a key",
        ),
        (
            PointwiseConfig,
            {"parser": {"line": "Score", "key": "score"}},
            "parser: takes a line, a key or a pattern, not two of them",
        ),
        (
            PointwiseConfig,
            {"parser": {"line": "a\nb"}},
            r"parser.line: 'a\nb' is not the label of a line",
        ),
        (
            PointwiseConfig,
            {"parser": {"key": "score"}},
            "parser.key: does not read 'Score: 0', which the general template asks for; set a "
            "template that asks for what it reads.",
        ),
        (
            PointwiseConfig,
            {"parser": {"pattern": r"Grade: (?P<score>\d+)"}},
            "parser.pattern: does not read 'Score: 0'",
        ),
        (
            RubricConfig,
            {**RUBRIC, "parser": {"pattern": r"(?P<name>\w+): (?P<score>\d+)"}},
            """parser.pattern: does not read '{"clear": 0.0}'""",
        ),
        (
            RubricConfig,
            {**RUBRIC, "parser": {"line": "Score"}},
            "parser.line: one line cannot hold the scores of all criteria",
        ),
        (
            PairwiseConfig,
            {"parser": {"key": "better"}},
            "parser.key: does not read 'Better: A'",
        ),
        (
            PointwiseConfig,
            {"parser": {"choices": {" ": 1.0}}},
            "parser.choices: an empty word is no choice",
        ),
        (
            PointwiseConfig,
            {"parser": {"choices": {"a": float("inf")}}},
            "parser.choices: 'a' stands for inf",
        ),
        (PointwiseConfig, {"votes": 0}, "votes: must be at least 1, is 0"),
        (PointwiseConfig, {"votes": 3, "greedy": True}, "votes: are all alike when greedy"),
        (PointwiseConfig, {"votes": 3, "min_parsed": 4}, "min_parsed: must be in 1..3, is 4"),
        (PointwiseConfig, {"retries": -1}, "retries: must not be negative"),
        (PointwiseConfig, {"stop_after": -1}, "stop_after: must not be negative"),
        (
            PointwiseConfig,
            {"scale": [1.0]},
            "scale: must be the worst and the best score, is [1.0]",
        ),
        (PointwiseConfig, {"scale": [1.0, 1.0]}, "scale: its ends are [1.0, 1.0]"),
        (PointwiseConfig, {"unfit_score": float("nan")}, "unfit_score: must be finite"),
        (RubricConfig, {"criteria": []}, "criteria: a rubric needs at least one"),
        (
            RubricConfig,
            {"criteria": [{"name": "A"}, {"name": "a "}]},
            "criteria: names must differ: a, a",
        ),
        (RubricConfig, {"criteria": [{"name": "a", "weight": 0.0}]}, "criteria.a.weight: is 0.0"),
        (
            RubricConfig,
            {**RUBRIC, "template": "{completion}"},
            "the template does not use {criteria}",
        ),
        (
            RubricConfig,
            {**RUBRIC, "template": "{completion} {criterion}"},
            "{criterion} is unknown",
        ),
        (
            RubricConfig,
            {**RUBRIC, "together": False, "template": "{completion}"},
            "does not use {criterion}",
        ),
        (RubricConfig, {**RUBRIC, "parser": {"key": "a"}}, "parser.key: the criteria are the keys"),
        (
            RubricConfig,
            {**RUBRIC, "parser": {"pattern": "(?P<score>.)"}},
            "parser.pattern: has no group (?P<name>...)",
        ),
        (PairwiseConfig, {"template": "{first}"}, "template: the template does not use {second}"),
        (PairwiseConfig, {"template": "{first} {second} {completion}"}, "{completion} is unknown"),
        (PairwiseConfig, {"opponents": 0}, "opponents: must be at least 1"),
        (PairwiseConfig, {"prior": 0.0}, "prior: must be positive"),
        (PairwiseConfig, {"parser": {"choices": {"A": 2.0}}}, "parser.choices: 'A' stands for 2.0"),
    ],
)
def test_a_bad_setting_is_refused(cls: type, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(wrong, cls)
    cause = caught.value.__cause__
    assert isinstance(cause, ConfigError)
    assert said in str(cause)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"parser": {"pattern": r"(?i)score\W*(?P<score>\d+)"}}, "Score is 4 of 10, so score = 6"),
        ({"parser": {"key": "s"}, "template": '{completion} {"s": 0 to 10}'}, 'hm {"s": 6}'),
        ({"parser": {"choices": {"six": 6.0}}, "template": "{completion}"}, "Six."),
        ({"parser": {"line": "Mark"}, "template": "{completion}"}, "Mark: 6"),
        ({"template": "{completion}"}, "Score: 6"),
    ],
)
def test_a_parser_that_fits_what_is_asked_is_taken(config: dict[str, Any], text: str) -> None:
    assert msgspec.convert(config, PointwiseConfig).reader()(text) == 6


@pytest.mark.parametrize("cls", [PointwiseConfig, RubricConfig, PairwiseConfig])
def test_settings_survive_conversion_to_plain_values(cls: type) -> None:
    given = {
        "system": "be strict",
        "parser": {"choices": {"A": 1.0, "B": 0.0}},
        **({"criteria": [{"name": "clear", "weight": 2.0}]} if cls is RubricConfig else {}),
    }
    plain = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(cls), given))
    assert msgspec.convert(plain, cls) == msgspec.convert(given, cls)


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.txt"
    file.write_text("rate {completion}\n")
    prompt = PointwiseConfig(path=str(file), form="text").make_form().fill({"completion": "C"}, {})
    assert (prompt.text, prompt.messages) == ("rate C\n", None)


def test_system_and_template_are_turns_of_a_chat() -> None:
    prompt = (
        PointwiseConfig(system="be strict", template="rate {completion}")
        .make_form()
        .fill({"completion": "C"}, {})
    )
    turns = [{"role": "system", "content": "be strict"}, {"role": "user", "content": "rate C"}]
    assert (prompt.text, prompt.messages) == (None, turns)


# -- images ----------------------------------------------------------------------------------------


def test_a_turn_that_shows_images_is_made_of_parts_in_the_order_of_the_template() -> None:
    form = PointwiseConfig(
        images=["a", "b"], template="{b} of {prompt}: {a}{b} {{a}}?", system="look"
    ).make_form()
    prompt = form.fill({"prompt": "{a}", "completion": ""}, {})
    assert form.shown == ["b", "a", "b"]
    assert prompt.messages == [
        {"role": "system", "content": "look"},
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": " of {a}: "},
                {"type": "image"},
                {"type": "image"},
                {"type": "text", "text": " {a}?"},
            ],
        },
    ]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (PointwiseConfig(images=["a", "b"]), ["a", "b"]),
        (RubricConfig(images=["a"], criteria=[Criterion(name="clear")]), ["a"]),
        (RubricConfig(images=["a"], criteria=[Criterion(name="clear")], together=False), ["a"]),
        (PairwiseConfig(images=["a"]), ["first_a", "second_a"]),
    ],
)
def test_the_general_templates_show_the_images(settings: JudgeConfig, shown: list[str]) -> None:
    assert settings.make_form().shown == shown
    assert settings.traits().shows_images


def test_a_judge_without_images_shows_none() -> None:
    assert not PointwiseConfig().traits().shows_images and PointwiseConfig().make_form().shown == []
