"""Which pair a rater sees next, and what a judgement becomes on disk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gcore_rewards.human.answers import Answer, Pair
from gcore_rewards.human.comparing import Comparing, Rules
from gcore_rewards.human.judgements import read_lines
from gcore_rewards.human.raters import Refusal
from gcore_rewards.human.tasks import Shown

from gcore_core.contract.errors import ConfigError, DataError


def pairs(count: int) -> list[Pair]:
    return [
        Pair(
            prompt=f"question {i}",
            answers=(
                Answer(text=f"a {i}", origin="step 0"),
                Answer(text=f"b {i}", origin="step 9"),
            ),
        )
        for i in range(count)
    ]


def judged(task: Comparing, rater: str, choice: str, shown: Shown | None = None) -> Shown:
    shown = shown or task.next(rater)
    assert shown is not None
    form = {"key": shown.key, "order": shown.order, "choice": choice, "seconds": "1.5"}
    task.answer(rater, form)
    return shown


def all_seen(task: Comparing, rater: str, choice: str = "left") -> list[Shown]:
    seen = []
    while (shown := task.next(rater)) is not None:
        seen.append(judged(task, rater, choice, shown))
    return seen


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_pair_is_judged_by_as_many_raters_as_wanted_and_by_each_once(tmp_path: Path) -> None:
    task = Comparing(pairs(5), tmp_path / "j.jsonl", Rules(raters=2))
    seen = {name: [shown.key for shown in all_seen(task, name)] for name in ("a", "b", "c")}
    assert sorted(seen["a"]) == sorted(seen["b"]) == sorted({*seen["a"]})
    assert seen["c"] == []


def test_the_pair_with_the_fewest_judgements_comes_first(tmp_path: Path) -> None:
    task = Comparing(pairs(6), tmp_path / "j.jsonl", Rules(raters=3))
    by_anna = {judged(task, "anna", "tie").key for _ in range(3)}
    by_ben = [shown.key for shown in all_seen(task, "ben")]
    assert by_anna.isdisjoint(by_ben[:3])
    assert by_anna == {*by_ben[3:]}


def test_what_another_rater_has_open_counts_as_judged(tmp_path: Path) -> None:
    task = Comparing(pairs(2), tmp_path / "j.jsonl", Rules(raters=2))
    first, second = task.next("anna"), task.next("ben")
    assert first is not None and second is not None and first.key != second.key


def test_the_same_seed_gives_the_same_order_and_sides_and_another_does_not(tmp_path: Path) -> None:
    def seen(name: str, seed: int) -> list[tuple[str, str]]:
        task = Comparing(pairs(20), tmp_path / name, Rules(seed=seed))
        return [(shown.key, shown.order) for shown in all_seen(task, "anna")]

    assert seen("1", 0) == seen("2", 0) != seen("3", 1)


def test_left_and_right_fall_by_chance(tmp_path: Path) -> None:
    """Of 400 fair throws, fewer than 150 on one side come once in two million times."""
    task = Comparing(pairs(400), tmp_path / "j.jsonl", Rules())
    orders = Counter(task._order_name(pair, "anna") for pair in pairs(400))
    assert min(orders["ab"], orders["ba"]) > 150


def test_no_rater_sees_a_pair_twice_in_one_order(tmp_path: Path) -> None:
    task = Comparing(pairs(8), tmp_path / "j.jsonl", Rules(raters=1, twice=True))
    seen = all_seen(task, "anna")
    assert len({(shown.key, shown.order) for shown in seen}) == len(seen) == 16
    assert len({shown.key for shown in seen[:8]}) == 8  # the second round begins after the first


def test_the_second_order_is_the_other_one_under_another_seed(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    task = Comparing(pairs(8), path, Rules(twice=True, seed=0))
    first = {shown.key: shown.answers for shown in (judged(task, "a", "tie") for _ in range(8))}
    task.close()
    later = all_seen(Comparing(pairs(8), path, Rules(twice=True, seed=5)), "a")
    assert {shown.key: shown.answers[::-1] for shown in later} == first


def test_a_judgement_says_who_preferred_which_answer_and_how_it_was_shown(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    shown = judged(Comparing(pairs(1), path, Rules()), "anna", "right")
    (line,) = lines_of(path)
    left, right = shown.answers
    origins = {"a 0": "step 0", "b 0": "step 9"}
    assert line.pop("time_unix_s") > 1.7e9
    assert line == {
        "what": "judgement",
        "number": 1,
        "pair": shown.key,
        "prompt": "question 0",
        "verdict": "better",
        "chosen": right,
        "rejected": left,
        "tie": False,
        "answers": [left, right],
        "origins": [origins[left], origins[right]],
        "rater": "anna",
        "seconds": 1.5,
    }


@pytest.mark.parametrize("choice", ["tie", "bad", "skip"])
def test_without_a_preference_nothing_is_chosen(tmp_path: Path, choice: str) -> None:
    path = tmp_path / "j.jsonl"
    judged(Comparing(pairs(1), path, Rules()), "anna", choice)
    (line,) = lines_of(path)
    assert (line["verdict"], line["chosen"], line["rejected"]) == (choice, None, None)
    assert line["tie"] is (choice != "skip")


def test_a_skipped_pair_is_not_shown_again_and_waits_for_others(tmp_path: Path) -> None:
    task = Comparing(pairs(1), tmp_path / "j.jsonl", Rules(raters=1, twice=True))
    judged(task, "anna", "skip")
    assert task.next("anna") is None
    assert task.next("ben") is not None


def test_undo_takes_the_last_judgement_back_and_shows_its_pair_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    task = Comparing(pairs(3), path, Rules())
    first = judged(task, "anna", "left")
    second = judged(task, "anna", "left")
    task.undo("anna", task.last("anna"))
    assert task.next("anna") == second
    assert [each.key for each in read_lines(path)] == [first.key]
    judged(task, "anna", "tie")
    assert [each.category for each in read_lines(path)][1:] == ["tie"]


def test_undo_undoes_once_and_only_what_is_the_raters_own(tmp_path: Path) -> None:
    task = Comparing(pairs(3), tmp_path / "j.jsonl", Rules())
    judged(task, "anna", "left")
    judged(task, "anna", "left")
    number = task.last("anna")
    with pytest.raises(Refusal):
        task.undo("ben", number)
    task.undo("anna", number)
    with pytest.raises(Refusal):  # a second click on the same page
        task.undo("anna", number)
    assert task.progress("anna").own == 1


def test_a_second_start_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    task = Comparing(pairs(4), path, Rules())
    before = {judged(task, "anna", "left").key for _ in range(2)}
    task.close()
    again = Comparing(pairs(4), path, Rules())
    assert again.progress("anna").own == 2
    after = {shown.key for shown in all_seen(again, "anna")}
    assert len(after) == 2 and before.isdisjoint(after)
    assert [line["number"] for line in lines_of(path)] == [1, 2, 3, 4]


def test_half_a_line_of_a_killed_writer_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    task = Comparing(pairs(4), path, Rules())
    judged(task, "anna", "left")
    task.close()
    with path.open("a") as file:
        file.write('{"what":"judgement","numb')
    assert len(read_lines(path)) == 1
    again = Comparing(pairs(4), path, Rules())
    judged(again, "anna", "left")
    assert len(read_lines(path)) == 2


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"what":"judgement"}\n')
    with pytest.raises(DataError) as caught:
        Comparing(pairs(1), path, Rules())
    assert caught.value.where == f"{path}:1"


def test_one_file_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    task = Comparing(pairs(1), path, Rules())
    with pytest.raises(ConfigError, match="another process writes"):
        Comparing(pairs(1), path, Rules())
    task.close()
    Comparing(pairs(1), path, Rules()).close()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"key": "0" * 32}, 404),
        ({"choice": "best"}, 422),
        ({"order": "swapped"}, 409),
    ],
)
def test_what_is_no_judgement_is_refused_and_not_written(
    tmp_path: Path, change: dict[str, str], status: int
) -> None:
    path = tmp_path / "j.jsonl"
    task = Comparing(pairs(1), path, Rules())
    shown = task.next("anna")
    assert shown is not None
    form = {"key": shown.key, "order": shown.order, "choice": "left"} | change
    with pytest.raises(Refusal) as caught:
        task.answer("anna", form)
    assert caught.value.status == status
    assert path.read_text() == ""


def test_a_second_click_judges_nothing_twice(tmp_path: Path) -> None:
    task = Comparing(pairs(1), tmp_path / "j.jsonl", Rules())
    shown = judged(task, "anna", "left")
    with pytest.raises(Refusal) as caught:
        judged(task, "anna", "left", shown)
    assert caught.value.status == 409


@pytest.mark.parametrize(
    ("said", "seconds"), [("2.25", 2.25), ("-1", 0.0), ("nan", 0.0), ("inf", 0.0), ("soon", 0.0)]
)
def test_seconds_are_what_the_browser_says_where_that_is_a_time(
    tmp_path: Path, said: str, seconds: float
) -> None:
    path = tmp_path / "j.jsonl"
    task = Comparing(pairs(1), path, Rules())
    shown = task.next("anna")
    assert shown is not None
    form = {"key": shown.key, "order": shown.order, "choice": "tie", "seconds": said}
    task.answer("anna", form)
    assert lines_of(path)[0]["seconds"] == seconds


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j.jsonl"
    task = Comparing(pairs(2), path, Rules())
    judged(task, "anna", "left")
    content = path.read_bytes()

    def fsync(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        with pytest.raises(OSError):
            judged(task, "anna", "left")
    assert path.read_bytes() == content
    assert task.progress("anna").own == 1
    judged(task, "anna", "left")  # the rater tries again
    assert len(read_lines(path)) == 2
