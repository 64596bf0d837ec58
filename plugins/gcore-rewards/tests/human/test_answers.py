"""Pairs of answers, from runs and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_rewards.human.answers import Pair, pairs_of_file, pairs_of_runs

from gcore_core.contract.errors import ConfigError, DataError


def run_with(directory: Path, steps: dict[int, list[dict[str, Any]]]) -> Path:
    (directory / "samples").mkdir(parents=True)
    for step, rows in steps.items():
        path = directory / "samples" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def rows(prompts: int, name: str) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p{i}", "text": f"{name} {mode} {i}", "mode": mode, "rewards": {}}
        for mode in ("greedy", "sampled")
        for i in range(prompts)
    ]


def texts(pair: Pair) -> set[str]:
    return {answer.text for answer in pair.answers}


def origins(pair: Pair) -> set[str]:
    return {answer.origin for answer in pair.answers}


def test_first_and_last_step_of_a_run_are_paired_by_prompt_and_mode(tmp_path: Path) -> None:
    run = run_with(tmp_path / "r", {0: rows(2, "old"), 5: rows(2, "mid"), 9: rows(2, "new")})
    found = pairs_of_runs(run)
    assert len(found.pairs) == 4
    assert all(len({text.split(" ", 1)[1] for text in texts(pair)}) == 1 for pair in found.pairs)
    assert {text.split()[0] for pair in found.pairs for text in texts(pair)} == {"old", "new"}
    assert f"{run} step 9 greedy" in {origin for pair in found.pairs for origin in origins(pair)}


def test_steps_can_be_chosen_and_one_step_pairs_greedy_with_sampled(tmp_path: Path) -> None:
    run = run_with(tmp_path / "r", {0: rows(2, "old"), 5: rows(2, "mid"), 9: rows(2, "new")})
    assert len(pairs_of_runs(run, steps=[0, 5]).pairs) == 4
    within = pairs_of_runs(run, steps=[5]).pairs
    assert sorted(map(sorted, map(texts, within))) == [
        ["mid greedy 0", "mid sampled 0"],
        ["mid greedy 1", "mid sampled 1"],
    ]


def test_two_runs_are_paired_at_the_last_step_of_each(tmp_path: Path) -> None:
    one = run_with(tmp_path / "1", {0: rows(1, "x"), 9: rows(1, "one")})
    other = run_with(tmp_path / "2", {0: rows(1, "x"), 7: rows(1, "two")})
    found = pairs_of_runs(one, other)
    assert [{text.split()[0] for text in texts(pair)} for pair in found.pairs] == [
        {"one", "two"}
    ] * 2


def test_equal_answers_and_answers_with_pictures_are_left_out_and_counted(tmp_path: Path) -> None:
    picture = {"prompt": "p9", "text": "", "mode": "greedy", "arrays": {"image": "a.npy"}}
    run = run_with(tmp_path / "r", {0: [*rows(2, "same"), picture], 1: rows(2, "same")})
    with pytest.raises(DataError) as caught:
        pairs_of_runs(run)
    assert "4 pairs are equal texts" in str(caught.value)
    assert "1 answers have pictures" in str(caught.value)
    assert "shows 3 prompts at step 0" in str(caught.value)
    assert "evaluation.show" in str(caught.value)


def test_a_run_without_answers_says_which_keys_write_some(tmp_path: Path) -> None:
    run = run_with(tmp_path / "r", {})
    with pytest.raises(DataError, match="no answers to compare") as caught:
        pairs_of_runs(run)
    assert "evaluation.data" in str(caught.value) and "evaluation.show" in str(caught.value)
    with pytest.raises(DataError, match="no such run"):
        pairs_of_runs(tmp_path / "nowhere")
    filled = run_with(tmp_path / "s", {3: rows(1, "x")})
    with pytest.raises(ConfigError, match="no answers of step 4") as wrong_step:
        pairs_of_runs(filled, steps=[3, 4])
    assert "it has: 3" in str(wrong_step.value)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_has_lists_of_answers_or_an_answer_a_row(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "p", "answers": ["x", "y", "z"]},
        {"prompt": chat, "answer": "one"},
        {"prompt": chat, "completion": "two", "model": "not shown"},
        {"prompt": "q", "chosen": "good", "rejected": [{"role": "assistant", "content": "bad"}]},
    )
    found = pairs_of_file(path)
    assert [(pair.prompt, sorted(texts(pair))) for pair in found.pairs if pair.prompt != "p"] == [
        (chat, ["one", "two"]),
        ("q", ["bad", "good"]),
    ]
    assert len(found.pairs) == 5
    assert len(pairs_of_file(path, per_prompt=2).pairs) == 4


def test_a_pair_has_one_name_whatever_the_order_of_its_answers(tmp_path: Path) -> None:
    one = pairs_of_file(write(tmp_path / "1", {"prompt": "p", "answers": ["x", "y"]})).pairs
    other = pairs_of_file(write(tmp_path / "2", {"prompt": "p", "answers": ["y", "x"]})).pairs
    assert [pair.digest for pair in one] == [pair.digest for pair in other]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "the row is no JSON"),
        ('{"answers": ["a", "b"]}', "the row has no prompt"),
        ('{"prompt": 3, "answers": ["a", "b"]}', "the row has no prompt"),
        ('{"prompt": [], "answer": "a"}', "the row has no prompt"),
        ('{"prompt": "p", "response": "a"}', "the row has no answer"),
        ('{"prompt": "p", "answers": ["a", 3]}', "the row has no answer"),
        ("[1]", "the row has no prompt"),
        ('{"prompt": "\\ud800", "answer": "a"}', "the row is no JSON"),
    ],
)
def test_a_bad_row_of_a_file_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "answers": ["a", "b"]}\n\n' + line + "\n")
    with pytest.raises(DataError, match=said) as caught:
        pairs_of_file(path)
    assert caught.value.where == f"{path}:3"


def test_a_file_without_a_pair_or_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no two different answers"):
        pairs_of_file(write(tmp_path / "a", {"prompt": "p", "answer": "a"}))
    with pytest.raises(DataError, match="cannot be read"):
        pairs_of_file(tmp_path / "nothing")
