"""YAML is read by the rules of version 1.2, and what is written reads as the same values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore_core.config import yaml12


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0012", 12),
        ("010", 10),
        ("09", 9),
        ("0o14", 12),
        ("0x1F", 31),
        ("-7", -7),
        ("1e3", 1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        *((text, text) for text in ("yes", "No", "on", "off", "y", "tRue", "12:30", "190:20:30")),
        *(
            (text, text)
            for text in ("1_000", "0b11", "2026-11-28", "2026-11-28 10:00:00", "=", ".")
        ),
    ],
)
def test_a_word_means_what_yaml_1_2_says(text: str, value: Any) -> None:
    for read in (yaml12.load(text), yaml12.scalar(text)):
        assert read == value and type(read) is type(value)
    assert yaml12.texts(yaml12.compose(text)) == text


def test_keys_are_texts_as_they_were_written() -> None:
    assert yaml12.load("on: 1\n0012: 2\nnull: 3\n2026-11-28: 4\n") == {
        "on": 1,
        "0012": 2,
        "null": 3,
        "2026-11-28": 4,
    }


def test_merged_mappings_come_after_own_keys_and_the_first_wins() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], x: 0}\n"
    assert yaml12.load(text)["c"] == {"x": 0, "y": 1, "z": 2}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!binary aGk=\n", "binary is not known"),
        ("a: !!python/name:os.system x\n", "is not known"),
        ("a: !!set {x}\n", "set is not known"),
        ("a: !!int many\n", "'many' is no int"),
        ("a: 1\na: 2\n", "duplicate key a"),
        ("? [a]\n: 1\n", "a key is a mapping or a list"),
        ("a: &x [*x]\n", "an alias lies within what it stands for"),
        ("a: {<<: 5}\n", "must be a mapping"),
    ],
)
def test_what_the_core_of_yaml_lacks_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(yaml.MarkedYAMLError, match=problem) as caught:
        yaml12.load(text)
    assert caught.value.problem_mark is not None


def test_aliases_that_make_too_many_values_are_refused() -> None:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 9)]
    with pytest.raises(yaml.MarkedYAMLError, match="too many values"):
        yaml12.load("\n".join(["l0: &l0 [1, 2, 3]", *levels]))


@pytest.mark.parametrize("value", [b"x", {1, 2}, 1j, object()])
def test_a_value_without_a_word_in_yaml_is_not_written(value: Any) -> None:
    with pytest.raises(yaml.YAMLError):
        yaml12.dump({"a": value})


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
    | st.from_regex(r"\A[-+0-9_.:eEox~yYnN]{1,8}\Z")
)
_TREES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text("abc01:-", max_size=3), inner)
)


@pytest.mark.rest
@settings(deadline=None, max_examples=500)
@given(_TREES)
def test_what_was_written_is_read_as_the_same_by_both_versions_of_yaml(value: Any) -> None:
    text = yaml12.dump({"a": value})
    assert yaml12.load(text) == {"a": value}
    assert yaml.safe_load(text) == {"a": value}


def test_a_value_that_stays_is_written_as_it_was_before() -> None:
    text = "a: 0012\nb: 1e3\nc: [0x1F, True]\nd: 3\n"
    tree = yaml12.load(text)
    assert yaml12.dump(tree, yaml12.texts(yaml12.compose(text))) == (
        "a: 0012\nb: 1e3\nc:\n- 0x1F\n- True\nd: 3\n"
    )
    tree["a"] = 13
    assert "a: 13\n" in yaml12.dump(tree, yaml12.texts(yaml12.compose(text)))
