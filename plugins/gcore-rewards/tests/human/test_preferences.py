"""Judgements become preference data: one row where raters agree enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcore_rewards.human.commands import pairs as command
from gcore_rewards.human.judgements import Judgement, Undone
from gcore_rewards.human.preferences import preferences

from gcore_core.contract.errors import ConfigError, DataError


def said(rater: str, what: str, pair: str = "p", prompt: Any = "q") -> Judgement:
    """What: the answer that is preferred, or "tie", "bad" or "skip"."""
    is_better = what in ("x", "y")
    return Judgement(
        number=1,
        pair=pair,
        prompt=prompt,
        verdict="better" if is_better else what,  # type: ignore[arg-type]
        chosen=what if is_better else None,
        rejected={"x": "y", "y": "x"}.get(what),
        tie=what in ("tie", "bad"),
        answers=("y", "x"),
        origins=("", ""),
        rater=rater,
        seconds=1.0,
        time_unix_s=0.0,
    )


def chosen(whats: str, **options: Any) -> str:
    """The chosen answers of the rows that raters a, b, ... make of one pair."""
    words = {"x": "x", "y": "y", "t": "tie", "b": "bad", "s": "skip"}
    lines = [said(f"rater {i}", words[what]) for i, what in enumerate(whats)]
    return "".join(row["chosen"] for row in preferences(lines, **options))


@pytest.mark.parametrize(
    ("whats", "majority", "everyone", "each"),
    [
        ("x", "x", "x", "x"),
        ("xx", "x", "x", "xx"),
        ("xy", "", "", "xy"),
        ("xxy", "x", "", "xxy"),
        ("xxt", "x", "", "xx"),
        ("xt", "", "", "x"),
        ("xb", "", "", "x"),
        ("xs", "x", "x", "x"),
        ("tt", "", "", ""),
        ("yyb", "y", "", "yy"),
        ("s", "", "", ""),
    ],
)
def test_what_raters_say_together(whats: str, majority: str, everyone: str, each: str) -> None:
    assert chosen(whats, by="majority") == majority
    assert chosen(whats, by="all") == everyone
    assert chosen(whats, by="each") == each


def test_a_tie_may_become_both_directions_and_two_bad_answers_nothing() -> None:
    assert sorted(chosen("tt", ties="both")) == ["x", "y"]
    assert chosen("ttx", ties="both", by="all") == ""
    assert sorted(chosen("tx", ties="both", by="each")) == ["x", "x", "y"]
    assert chosen("bb", ties="both") == ""


def test_a_rater_who_preferred_either_has_one_vote_for_a_tie() -> None:
    lines = [said("a", "x"), said("a", "y"), said("b", "x"), said("c", "x")]
    (row,) = preferences(lines)
    assert row == {
        "prompt": "q",
        "chosen": "x",
        "rejected": "y",
        "votes": {"chosen": 2, "rejected": 0, "tie": 1},
    }


def test_answers_to_a_chat_are_turns_of_the_assistant() -> None:
    prompt = [{"role": "user", "content": "hello"}]
    (row,) = preferences([said("a", "x", prompt=prompt)])
    assert row["prompt"] == prompt
    assert row["chosen"] == [{"role": "assistant", "content": "x"}]
    assert row["rejected"] == [{"role": "assistant", "content": "y"}]


def test_the_command_writes_the_fields_format_without_what_was_taken_back(tmp_path: Path) -> None:
    file, to = tmp_path / "j.jsonl", tmp_path / "pairs.jsonl"
    lines = [
        said("a", "x"),
        msgspec.structs.replace(said("a", "y", pair="other"), number=2),
        Undone(number=2, rater="a", time_unix_s=0.0),
    ]
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert command([str(file), "--to", str(to)]) == 0
    (row,) = map(json.loads, to.read_text().splitlines())
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("q", "x", "y")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    file.write_bytes(msgspec.json.encode(said("a", "x")) + b"\n")
    with pytest.raises(ConfigError, match="--to: .* cannot be written: No such file or directory"):
        command([str(file), "--to", str(tmp_path / "gone" / "pairs.jsonl")])


def test_a_file_without_a_preference_writes_nothing(tmp_path: Path) -> None:
    file, to = tmp_path / "j.jsonl", tmp_path / "pairs.jsonl"
    file.write_bytes(msgspec.json.encode(said("a", "tie")) + b"\n")
    with pytest.raises(DataError, match="no preference to write"):
        command([str(file), "--to", str(to)])
    assert not to.exists()


def test_rows_do_not_replace_judgements_and_a_file_that_cannot_be_written_is_named(
    tmp_path: Path,
) -> None:
    file = tmp_path / "j.jsonl"
    line = msgspec.json.encode(said("a", "x")) + b"\n"
    file.write_bytes(line)
    with pytest.raises(ConfigError, match="would replace the judgements"):
        command([str(file), "--to", str(file)])
    assert file.read_bytes() == line
    with pytest.raises(ConfigError, match="cannot be written"):
        command([str(file), "--to", str(tmp_path / "nowhere" / "pairs.jsonl")])


def test_a_file_with_a_bad_row_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    file.write_bytes(msgspec.json.encode(said("a", "x")) + b'\n{"what":"judgement"}\n')
    with pytest.raises(DataError) as caught:
        command([str(file), "--to", str(tmp_path / "pairs.jsonl")])
    assert caught.value.where == f"{file}:2"
