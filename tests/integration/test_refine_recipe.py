"""The recipe that draws answers, looks at them and draws the nearest one again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract.factories import import_file

pytest.importorskip("gcore_environments")
RECIPES = Path(__file__).parents[2] / "recipes"
PROMPT = "7+3+8+5+2="
ROW = {
    "prompt": PROMPT,
    "messages": [{"role": "user", "content": PROMPT}],
    "answer": "25",
}


@pytest.fixture
def refine() -> ModuleType:
    return import_file(RECIPES / "refine" / "refine.py")


def episode(
    refine: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: Sequence[str], **config: int
) -> tuple[dict[str, float], list[list[str]]]:
    """Returns the rewards of an episode in which the policy says ``answers``, and what it read."""
    left, read = list(answers), []

    async def ask(endpoint: Any, messages: list[dict[str, Any]]) -> str:
        read.append([message["content"] for message in messages])
        return left.pop(0)

    monkeypatch.setattr(refine, "ask", ask)
    rewards = asyncio.run(refine.Refine(**config).run(ROW, 0, None))
    assert not left, "each answer was asked for"
    return rewards, read


def test_the_nearest_wrong_answer_is_drawn_again_with_a_critique(
    refine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["?31", "?24", "", ":0710182325"]
    rewards, read = episode(refine, monkeypatch, answers, first=3, again=1)
    assert rewards == {"first": 0.0, "last": 1.0}
    assert read == [["7+3+8+5+2="]] * 3 + [["7+3+8+5+2=", "?24", "n7+3+8+5+2="]]


def test_what_is_drawn_again_goes_on_behind_all_that_was_said(
    refine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards, read = episode(refine, monkeypatch, ["?31", "?30", "?29"], first=1, again=2)
    assert rewards == {"first": 0.0, "last": 0.0}
    assert read[-1] == ["7+3+8+5+2=", "?31", "n7+3+8+5+2=", "?30", "n7+3+8+5+2="]


def test_nothing_is_drawn_again_where_an_answer_is_right(
    refine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards, _ = episode(refine, monkeypatch, ["?31", "?25"], first=2, again=1)
    assert rewards == {"first": 0.5, "last": 1.0}


def test_the_yaml_is_a_valid_job_whose_turns_have_room() -> None:
    for plugin in ("gcore_torch", "gcore_algorithms", "gcore_report"):
        pytest.importorskip(plugin)
    plan = load_plan(RECIPES / "refine.yaml")
    config = plan.at("environment.config")
    turns = config["config"]["first"] + config["config"]["again"]
    assert config["turns"] == turns
    assert plan.at("roles.rollout.config.max_new_tokens") == turns * config["turn_tokens"]


@pytest.mark.rest
def test_two_steps_train_on_all_that_an_episode_has(tmp_path: Path) -> None:
    """A short run, as a person starts it. The trainer's log-probs of each answer, also of one that
    was drawn behind another with its critique, are the generator's.
    """
    overrides = ["run.steps=2", "evaluation.every=2", "evaluation.prompts=16", "run.dir=run"]
    job = [str(RECIPES / "refine.yaml"), *overrides, "plugins=[]"]
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", "run", *job],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    metrics = rows[-1]["metrics"]
    assert metrics["logprob_gap_max"] < 1e-3
    assert 0 < metrics["masked_share"] < 0.6, "critiques and answers gone on from train nothing"
    assert metrics["reward/first"] < metrics["reward/last"], "the last is the best of several"
