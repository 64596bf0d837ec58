"""Every format of the field is found out by its fields, and a wrong row is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_algorithms.offline.config import RowsFileConfig
from gcore_algorithms.offline.dataset import ChatRows, PairRows, ScoredRows
from gcore_algorithms.offline.rows import Example, example_in, example_of

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import Prompt


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"prompt": "a", "completion": "b"}, Example("a", ["b"])),
        ({"prompt": "a", "response": "b"}, Example("a", ["b"])),
        ({"text": "ab"}, Example("", ["ab"])),
        ({"messages": [user("a"), says("b")]}, Example([], [[user("a"), says("b")]])),
        ({"prompt": [user("a")], "completion": [says("b")]}, Example([user("a")], [[says("b")]])),
        ({"prompt": [user("a")], "completion": "b"}, Example([user("a")], [[says("b")]])),
    ],
)
def test_answers_are_found_in_each_format(row: Any, example: Example) -> None:
    assert example_of(row, "chat", "row 0") == example


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, Example("a", ["b", "c"])),
        (
            {"prompt": [user("a")], "chosen": [says("b")], "rejected": [says("c")]},
            Example([user("a")], [[says("b")], [says("c")]]),
        ),
        (  # the whole chat as an answer, beside its prompt as a text
            {
                "prompt": "a",
                "chosen": [user("a"), says("b")],
                "rejected": [user("a"), says("c")],
            },
            Example([user("a")], [[says("b")], [says("c")]]),
        ),
        (  # no prompt: what both begin with
            {
                "chosen": [user("a"), says("x"), user("y"), says("b")],
                "rejected": [user("a"), says("x"), user("y"), says("c"), user("z"), says("d")],
            },
            Example(
                [user("a"), says("x"), user("y")], [[says("b")], [says("c"), user("z"), says("d")]]
            ),
        ),
        (
            {
                "chosen": "\n\nHuman: hi\n\nAssistant: good day",
                "rejected": "\n\nHuman: hi\n\nAssistant: good night",
            },
            Example("\n\nHuman: hi\n\nAssistant:", [" good day", " good night"]),
        ),
        (
            {"chosen": "the sky is blue", "rejected": "the sky is bleak"},
            Example("the sky is", [" blue", " bleak"]),
        ),
    ],
    ids=["texts", "chats", "whole chats", "implicit chat", "dialogue", "implicit text"],
)
def test_pairs_are_found_in_each_format(row: Any, example: Example) -> None:
    assert example_of(row, "pairs", "row 0") == example


def test_a_margin_is_given_or_is_the_difference_of_scores() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert example_of({**pair, "margin": 2}, "pairs", "").label == 2
    scores = {"score_chosen": 8.5, "score_rejected": 6.0}
    assert example_of({**pair, **scores}, "pairs", "").label == 2.5
    assert example_of(pair, "pairs", "").label == 0


def test_a_score_belongs_to_its_answer() -> None:
    row = {"prompt": "a", "completion": "b", "score": 0.25}
    assert example_of(row, "scores", "") == Example("a", ["b"], 0.25)
    assert example_of({"prompt": "a", "response": "b", "label": True}, "scores", "").label == 1


@pytest.mark.parametrize("score", [10**400, -(10**400), 1e39, float("nan")])
def test_a_score_that_no_float32_can_hold_is_refused(score: float) -> None:
    row = {"prompt": "a", "completion": "b", "score": score}
    with pytest.raises(DataError, match="field 'score' is .*, not a finite number of float32"):
        example_of(row, "scores", "")
    far = {"score_chosen": 3e38, "score_rejected": -3e38}
    with pytest.raises(DataError, match="field 'score_chosen - score_rejected' is"):
        example_of({"prompt": "a", "chosen": "b", "rejected": "c", **far}, "pairs", "")


@pytest.mark.parametrize("answers", [1, 2])
def test_rows_of_another_dataset_are_read_alike(answers: int) -> None:
    fields = {"chosen": "b", "rejected": "c"} if answers == 2 else {"completion": "b"}
    prompt = Prompt(row=3, text="a", fields=fields)
    assert example_in(prompt, answers) == Example("a", ["b", "c"][:answers])
    chat = Prompt(row=3, messages=[user("a"), says("b")])
    assert example_in(chat, 1) == Example([], [[user("a"), says("b")]])


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("chat", {"question": "a"}, "in no format of this dataset"),
        ("chat", {"completion": "a"}, "in no format of this dataset"),
        ("chat", {"messages": [user("a")]}, "no turn of messages is the assistant's"),
        ("chat", {"messages": "a"}, "neither a text nor a list of messages"),
        ("chat", {"prompt": "a", "completion": 3}, "neither a text nor a list of messages"),
        ("chat", {"text": 3}, "not a text"),
        ("pairs", {"prompt": "a", "chosen": "b"}, "in no format of this dataset"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "not a finite"),
        ("pairs", {"chosen": "same", "rejected": "same"}, "so there is no prompt"),
        ("pairs", {"chosen": [says("a")], "rejected": [says("b")]}, "no prompt in common"),
        (
            "pairs",
            {"prompt": [user("a")], "chosen": [user("b")], "rejected": [says("c")]},
            "does not begin with a turn of the assistant",
        ),
        ("scores", {"prompt": "a", "completion": "b"}, "in no format of this dataset"),
        ("scores", {"prompt": "a", "completion": "b", "score": "high"}, "not a finite number"),
        ("scores", {"prompt": "a", "completion": "b", "score": 1e39}, "not a finite number"),
    ],
)
def test_a_row_of_no_format_is_refused_and_named(
    kind: Any, row: Any, message: str, tmp_path: Path
) -> None:
    good = {
        "chat": {"text": "a"},
        "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
        "scores": {"prompt": "a", "completion": "b", "score": 1},
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(good[kind]) + "\n\n" + json.dumps(row) + "\n")
    dataset = {"chat": ChatRows, "pairs": PairRows, "scores": ScoredRows}[kind]
    with pytest.raises(DataError, match=message) as caught:
        dataset(RowsFileConfig(path=str(file)))
    assert "line 3 (row 1)" in str(caught.value)


def test_lines_that_are_no_objects_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for text, message in (("{", "not JSON"), ("[1]", "expected an object"), ("\n", "no rows")):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            ChatRows(RowsFileConfig(path=str(file)))


def test_a_row_that_has_changed_since_the_file_was_opened_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "b"}')
    rows = ChatRows(RowsFileConfig(path=str(file)))
    assert len(rows) == 2
    assert rows[1] == rows[1]
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n{"text": 12 }')
    with pytest.raises(DataError, match="row 1 is no longer what it was"):
        rows[1]
    rows.close()
