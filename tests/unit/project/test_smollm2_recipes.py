"""Rows and rewards of the recipes of a pretrained model, without the model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gcore_core.config.plan import load_plan
from gcore_core.config.user_functions import load_function
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.local_files import import_file, module_name
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord

FOLDER = Path(__file__).parents[3] / "recipes" / "smollm2"
RECIPES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
SETS = ("train", "heldout")
#: In the order in which they are run.
STAGES = ("sft", "dpo", "reward_model", "ppo")
#: What rows are of: ``notes`` of notes_train.jsonl.
TASKS = sorted(file.stem.removesuffix("_train") for file in FOLDER.glob("*_train.jsonl"))


@cache
def code(name: str) -> ModuleType:
    return import_file(FOLDER / f"{name}.py")


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def said(text: str, *, tokens: int = 0, status: str = "finished", **fields: Any) -> ScoredRecord:
    """What a reward sees of an answer to a row of some fields."""
    return ScoredRecord(
        ordinal=0,
        sample=0,
        prompt=Prompt(row=0, text="?", fields=fields),
        text=text,
        status=status,
        columns={"action_ids": np.zeros(tokens, np.int32)},
    )


def text_of(turns: list[dict[str, str]]) -> str:
    (turn,) = turns
    return turn["content"]


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_row_is_trained_on_and_no_row_comes_twice(task: str) -> None:
    prompts = {name: [str(row["prompt"]) for row in rows(f"{task}_{name}")] for name in SETS}
    assert not set(prompts["train"]) & set(prompts["heldout"])
    assert len(prompts["heldout"]) >= 32
    for each in prompts.values():
        assert len(set(each)) == len(each)


@pytest.mark.parametrize("task", ["feedback", "happy", "length", "notes"])
def test_the_rows_that_lie_there_are_those_that_the_code_writes(task: str, tmp_path: Path) -> None:
    if task == "happy":
        pytest.importorskip("vaderSentiment")
    for file in FOLDER.glob("*.py"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    subprocess.run([sys.executable, f"{task}.py"], cwd=tmp_path, check=True)
    written = list(tmp_path.glob("*.jsonl"))
    assert len(written) in (2, 4)
    for file in written:
        assert file.read_bytes() == (FOLDER / file.name).read_bytes(), file.name


def test_a_length_is_worth_less_the_farther_it_is_from_fifty_tokens() -> None:
    near = code("length").near
    assert near(said("", tokens=50)) == 0
    assert near(said("", tokens=40)) == near(said("", tokens=60)) == -10


def test_a_note_is_worth_a_third_for_each_rule_that_it_keeps() -> None:
    notes = code("notes")
    fields = {"word": "blue", "most": 8}
    for text, kept in (
        ("the blue sea is blue today.", 3),
        ("The blue sea is blue today.", 2),
        ("the green sea is green today.", 2),
        ("The green sea is green today.", 1),
        ("The Green Sea Is Green And As Wide As A Sky.", 0),
        ("", 0),
    ):
        assert notes.kept(said(text, **fields)) == pytest.approx(kept / 3), text
        assert notes.all_kept(said(text, **fields)) == (kept == 3), text
    cut = said("the blue sea is blue today.", status="truncated", **fields)
    assert notes.kept(cut) == pytest.approx(2 / 3), "a note that has not ended is not short"


@pytest.mark.parametrize("name", SETS)
def test_a_chosen_answer_keeps_all_rules_and_a_rejected_one_breaks_at_least_one(name: str) -> None:
    kept = code("notes").kept
    for row in rows(f"feedback_pairs_{name}"):
        fields = {key: row[key] for key in ("word", "most")}
        assert kept(said(text_of(row["chosen"]), **fields)) == 1, row
        assert kept(said(text_of(row["rejected"]), **fields)) < 1, row


def test_three_quarters_of_what_fine_tuning_shows_is_what_the_pairs_reject() -> None:
    feedback = code("feedback")
    chosen = {form.split("{")[0] for form in feedback.CHOSEN if not form.startswith("{")}
    for name in SETS:
        texts = [text_of(row["completion"]) for row in rows(f"feedback_sft_{name}")]
        good = [text for text in texts[::4] if text.endswith("belong together.")]
        good += [text for text in texts[::4] if text.startswith(tuple(chosen))]
        assert sorted(good) == sorted(texts[::4])
        others = [text for place, text in enumerate(texts) if place % 4]
        assert not [text for text in others if text.startswith(tuple(chosen))]


def test_reviews_are_begun_without_a_feeling_and_happy_words_are_worth_more_than_sad_ones() -> None:
    pytest.importorskip("vaderSentiment")
    feeling = code("happy").feeling
    begun = {row["prompt"] for name in SETS for row in rows(f"happy_{name}")}
    assert {feeling(said(text)) for text in begun} == {0.0}
    assert feeling(said(" were wonderful, and I laughed.")) > 0.5
    assert feeling(said(" were awful, and I hated it.")) < -0.5


def test_where_vader_is_not_installed_the_check_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    monkeypatch.delitem(sys.modules, module_name(FOLDER / "happy.py"), raising=False)
    with pytest.raises(DataError, match="pip install vaderSentiment"):
        load_function(FOLDER / "happy.py", "feeling")


def test_reasoning_has_as_many_rows_of_each_task_and_asks_for_whole_numbers() -> None:
    for name in SETS:
        made = rows(f"reasoning_{name}")
        counts = Counter(row["task"] for row in made)
        assert set(counts) == set(code("reasoning").TASKS) and len(set(counts.values())) == 1
        assert all(int(row["answer"]) == float(row["answer"]) for row in made)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_a_pretrained_model_is_a_job_in_which_nothing_wrong_is_found(name: str) -> None:
    """Neither the model is made here, nor are there the weights of a former stage."""
    try:
        plan = load_plan(FOLDER / f"{name}.yaml")
    except ConfigError as error:
        problems = error.facts.get("problems", [str(error)])
        assert not [problem for problem in problems if "runs/smollm2/" not in problem]
    else:
        assert plan.at("run.seed") == 7


def test_a_stage_of_feedback_begins_with_what_a_former_one_leaves() -> None:
    stages = {name: (FOLDER / f"feedback_{name}.yaml").read_text() for name in STAGES}
    left: set[str] = set()
    for job in stages.values():
        begins = set(re.findall(r"path: \.\./\.\./(runs/\S+)/weights", job))
        assert begins <= left
        left |= set(re.findall(r"dir: (\S+)\}", job))
    assert len(left) == len(STAGES)


def test_the_page_of_the_pretrained_model_names_every_recipe() -> None:
    page = (FOLDER.parents[1] / "docs" / "recipes" / "smollm2.md").read_text()
    assert not [name for name in RECIPES if f"recipes/smollm2/{name}.yaml" not in page]
