"""The reward that asks people: it asks once, waits as long as it says, makes no label up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gcore_rewards.human import gcore_rewards
from gcore_rewards.human.checks import problems_of
from gcore_rewards.human.commands import label as command
from gcore_rewards.human.config import HumanConfig
from gcore_rewards.human.judgements import Label, read_lines
from gcore_rewards.human.labelling import Labelling
from gcore_rewards.human.queue import Question, Questions, labels_path, questions_path, queues_of
from gcore_rewards.human.raters import Refusal
from gcore_rewards.human.reward import HumanReward
from gcore_testing.contracts.scorer import scored_record

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import Score, ScoredRecord


def a_record(text: str, ordinal: int = 0, prompt: str = "a question") -> ScoredRecord:
    record = scored_record(ordinal, text, {})
    return dataclasses.replace(record, prompt=Prompt(row=0, text=prompt))


def reward(run: Path, progress: Any = lambda: None, **config: Any) -> HumanReward:
    context = WorkerContext(role="scorer", directory=str(run), progress=progress)
    return HumanReward(HumanConfig(**{"poll_s": 0.01, "wait_s": 30.0, **config}), context)


def questions(run: Path) -> list[str]:
    """The answers that wait for labels."""
    return [question.answer for question in Questions(run / "human").waiting().values()]


def answer(labelling: Labelling, choice: str, rater: str = "anna") -> str:
    shown = labelling.next(rater)
    assert shown is not None
    labelling.answer(rater, {"key": shown.key, "choice": choice, "seconds": "1"})
    return shown.answers[0]


async def until_asked(run: Path, count: int) -> None:
    while len(questions(run)) < count:
        await asyncio.sleep(0.005)


async def labelled(run: Path, scorer: HumanReward, choices: Mapping[str, str]) -> list[Score]:
    """Scores one record for each text, and answers each as ``choices`` says."""
    task = asyncio.ensure_future(scorer.score([a_record(text) for text in choices]))
    await until_asked(run, len(choices))
    labelling = Labelling(run / "human")
    while (shown := labelling.next("anna")) is not None:
        form = {"key": shown.key, "choice": choices[shown.answers[0]]}
        labelling.answer("anna", form)
    labelling.close()
    return await asyncio.wait_for(task, 20)


async def test_yes_is_one_and_no_is_zero(tmp_path: Path) -> None:
    scores = await labelled(tmp_path, reward(tmp_path), {"good": "1", "bad": "0"})
    assert [score.value for score in scores] == [1.0, 0.0]


async def test_a_scale_becomes_zero_to_one(tmp_path: Path) -> None:
    scorer = reward(tmp_path, form="scale", lowest=1, highest=5)
    scores = await labelled(tmp_path, scorer, {"a": "1", "b": "2", "c": "5"})
    assert [score.value for score in scores] == [0.0, 0.25, 1.0]


async def test_several_raters_are_waited_for_and_their_mean_is_taken(tmp_path: Path) -> None:
    task = asyncio.ensure_future(reward(tmp_path, raters=2).score([a_record("x")]))
    await until_asked(tmp_path, 1)
    labelling = Labelling(tmp_path / "human")
    answer(labelling, "1", "anna")
    assert labelling.next("anna") is None  # nobody labels for two
    await asyncio.sleep(0.05)
    assert not task.done()
    answer(labelling, "0", "ben")
    (score,) = await asyncio.wait_for(task, 20)
    assert score.value == 0.5
    assert labelling.next("carl") is None
    labelling.close()


async def test_a_label_that_does_not_come_is_a_failure_and_no_number(tmp_path: Path) -> None:
    (score,) = await reward(tmp_path, wait_s=0.05).score([a_record("x")])
    assert (score.value, score.status) == (None, "failed")
    assert score.reason == "not labelled within wait_s, 0.05 s"
    assert questions(tmp_path) == []  # nobody is asked for what nobody waits for


async def test_equal_answers_are_asked_about_once_in_a_call_and_ever_after(tmp_path: Path) -> None:
    scorer = reward(tmp_path)
    task = asyncio.ensure_future(scorer.score([a_record("x", 1), a_record("x", 2)]))
    also = asyncio.ensure_future(scorer.score([a_record("x", 3)]))
    await until_asked(tmp_path, 1)
    labelling = Labelling(tmp_path / "human")
    answer(labelling, "1")
    assert [score.value for score in await task + await also] == [1.0] * 3
    assert [s.value for s in await scorer.score([a_record("x", 4)])] == [1.0]
    another_process = reward(tmp_path)
    assert [s.value for s in await another_process.score([a_record("x", 4)])] == [1.0]
    assert labelling.next("ben") is None
    assert questions_path(tmp_path / "human").read_text().count('"what":"question"') == 1
    labelling.close()


async def test_another_prompt_or_another_question_is_asked_about_anew(tmp_path: Path) -> None:
    await labelled(tmp_path, reward(tmp_path), {"x": "1"})
    for scorer, record in (
        (reward(tmp_path, wait_s=0.03), a_record("x", prompt="another")),
        (reward(tmp_path, wait_s=0.03, question="Is it short?"), a_record("x")),
        (reward(tmp_path, wait_s=0.03, form="scale"), a_record("x")),
        (reward(tmp_path, wait_s=0.03, raters=2), a_record("x")),
    ):
        (score,) = await scorer.score([record])
        assert score.status == "failed"


async def test_what_a_stopped_process_asked_is_not_asked_again_once_it_was_answered(
    tmp_path: Path,
) -> None:
    task = asyncio.ensure_future(reward(tmp_path).score([a_record("x"), a_record("y")]))
    await until_asked(tmp_path, 2)
    task.cancel()
    labelling = Labelling(tmp_path / "human")
    assert answer(labelling, "1") == "x"  # people may go on while the run is stopped
    resumed = reward(tmp_path)
    assert questions(tmp_path) == []  # it may draw other answers than before
    again = asyncio.ensure_future(resumed.score([a_record("x"), a_record("y")]))
    await until_asked(tmp_path, 1)
    assert questions(tmp_path) == ["y"]
    answer(labelling, "0")
    assert [score.value for score in await again] == [1.0, 0.0]
    labelling.close()


async def test_runs_that_share_a_directory_use_each_others_labels_and_take_no_question_away(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "human"
    one = reward(tmp_path / "run 1", path=str(shared))
    task = asyncio.ensure_future(one.score([a_record("x")]))
    await until_asked(tmp_path, 1)
    other = reward(tmp_path / "run 2", path=str(shared), wait_s=0.05)
    (score,) = await other.score([a_record("x")])
    assert score.status == "failed"
    await until_asked(tmp_path, 1)  # the other has withdrawn it, and the first asks again
    labelling = Labelling(shared)
    answer(labelling, "1")
    labelling.close()
    assert [score.value for score in await task] == [1.0]
    assert [score.value for score in await other.score([a_record("x")])] == [1.0]


async def test_the_wait_shows_progress_all_the_time(tmp_path: Path) -> None:
    signs: list[int] = []
    scorer = reward(tmp_path, progress=lambda: signs.append(1), wait_s=0.2)
    await scorer.score([a_record("x")])
    assert len(signs) >= 5


async def test_evaluations_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    (score,) = await reward(tmp_path).score([a_record("x", ordinal=-1)])
    assert (score.value, score.status) == (None, "skipped")
    (asked,) = await reward(tmp_path, wait_s=0.03, evaluation=True).score([a_record("x", -1)])
    assert asked.status == "failed"


async def test_a_label_that_was_taken_back_counts_no_longer(tmp_path: Path) -> None:
    task = asyncio.ensure_future(reward(tmp_path, raters=2).score([a_record("x")]))
    await until_asked(tmp_path, 1)
    labelling = Labelling(tmp_path / "human")
    answer(labelling, "1", "anna")
    labelling.undo("anna", labelling.last("anna"))
    answer(labelling, "1", "ben")
    await asyncio.sleep(0.05)
    assert not task.done()
    answer(labelling, "0", "anna")
    assert [score.value for score in await task] == [0.5]
    labelling.close()


async def test_a_bad_line_among_labels_ends_the_wait_and_is_named(tmp_path: Path) -> None:
    path = labels_path(tmp_path / "human")
    path.parent.mkdir()
    path.write_text("nonsense\n")
    with pytest.raises(DataError) as caught:
        await reward(tmp_path).score([a_record("x")])
    assert caught.value.where == f"{path}:1"


# -- the page's side -------------------------------------------------------------------------------


def a_question(key: str, **changes: Any) -> Question:
    values: dict[str, Any] = {
        "key": key,
        "prompt": "p",
        "answer": f"answer {key}",
        "question": "Good?",
        "form": "yes_no",
        "lowest": 1,
        "highest": 5,
        "raters": 2,
        "asker": "run scorer 0",
        "time_unix_s": 0.0,
    }
    return Question(**{**values, **changes})


def test_the_question_with_the_fewest_labels_comes_first_then_the_oldest(tmp_path: Path) -> None:
    Questions(tmp_path).append([a_question(key) for key in "abc"])
    labelling = Labelling(tmp_path)
    assert [answer(labelling, "1", "anna") for _ in range(2)] == ["answer a", "answer b"]
    assert [answer(labelling, "0", "ben") for _ in range(2)] == ["answer c", "answer a"]
    Questions(tmp_path).append([a_question("d")])
    assert answer(labelling, "skip", "ben") == "answer d"
    assert answer(labelling, "skip", "ben") == "answer b"
    assert labelling.next("ben") is None
    progress = labelling.progress("anna")
    assert (progress.own, progress.own_of, progress.made, progress.made_of) == (2, 4, 4, 8)
    labelling.close()


def test_a_label_that_fits_no_question_is_refused(tmp_path: Path) -> None:
    Questions(tmp_path).append([a_question("a", form="scale")])
    labelling = Labelling(tmp_path)
    for form, status in (
        ({"key": "none", "choice": "1"}, 404),
        ({"key": "a", "choice": "6"}, 422),
        ({"key": "a", "choice": "yes"}, 422),
    ):
        with pytest.raises(Refusal) as caught:
            labelling.answer("anna", form)
        assert caught.value.status == status
    answer(labelling, "5")
    with pytest.raises(Refusal) as again:
        labelling.answer("anna", {"key": "a", "choice": "4"})
    assert again.value.status == 409
    (label,) = read_lines(labels_path(tmp_path))
    assert isinstance(label, Label) and label.value == 5
    labelling.close()


def test_the_page_of_a_run_can_be_opened_before_its_first_question(tmp_path: Path) -> None:
    rewards: dict[str, Any] = {
        "one": {"use": "human", "config": {"path": ""}},
        "two": {"use": "core/function"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps({"rewards": rewards}))  # JSON is YAML
    assert queues_of(tmp_path) == [tmp_path / "human"]
    rewards["two"] = {"use": "human/default", "config": {"path": "/elsewhere"}}
    (tmp_path / "config.yaml").write_text(json.dumps({"rewards": rewards}))
    with pytest.raises(ConfigError, match="several directories"):
        command([str(tmp_path)])


def test_a_run_that_asks_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is asked here"):
        command([str(tmp_path)])
    (tmp_path / "config.yaml").write_text('{"rewards": {"one": {"use": "core/function"}}}')
    with pytest.raises(DataError, match="nothing is asked here"):
        command([str(tmp_path)])


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"question": " "}, "question: must not be empty"),
        ({"lowest": 5}, "highest: must be above lowest (5), is 5"),
        ({"lowest": 0, "highest": 10}, "highest: the scale has 11 numbers, at most 10 fit"),
        ({"raters": 0}, "raters: must be at least 1, is 0"),
        ({"wait_s": 0.0}, "wait_s: must be positive, is 0"),
        ({"poll_s": float("nan")}, "poll_s: must be positive, is nan"),
    ],
)
def test_a_bad_setting_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HumanConfig(**wrong)
    assert said in str(caught.value)


def plan(
    timeout_s: float, shards: int = 1, patience_s: float = 600.0, **config: Any
) -> dict[str, Any]:
    human = {"use": "human", "timeout_s": timeout_s, "config": {"wait_s": 7200.0, **config}}
    other = {"use": "core/function", "timeout_s": 1.0, "config": {}}
    return {
        "rewards": {"liked": human, "other": other},
        "controller": {"shards": shards},
        "run": {"patience_s": patience_s},
    }


def test_every_word_that_chooses_the_reward_is_checked() -> None:
    (provider,) = gcore_rewards()
    for use in ("human", f"human/{provider.name}"):
        job = plan(10.0)
        job["rewards"]["liked"]["use"] = use
        assert len(list(problems_of(job))) == 1, use


def test_the_check_finds_limits_that_come_before_the_people() -> None:
    assert list(problems_of(plan(7260.0))) == []
    (problem,) = problems_of(plan(10.0))
    assert problem.startswith("rewards.liked.timeout_s: must be longer than config.wait_s (7200 s)")
    (looks,) = problems_of(plan(7260.0, poll_s=900.0))
    assert looks.startswith("rewards.liked.config.poll_s: must be shorter than run.patience_s")
    (shards,) = problems_of(plan(7260.0, shards=2))
    assert shards.startswith("run.patience_s: with 2 shards, one waits 1800 s for another")
    assert list(problems_of(plan(7260.0, shards=2, patience_s=2460.0))) == []
