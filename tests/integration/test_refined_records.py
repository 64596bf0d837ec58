"""Records that are made from earlier ones of their group, in a run of real processes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import fake

from tests.support import runs

WRITES = '''
"""A trainer that writes down prompt, text and advantage of each record, and a reward that says
what it counts."""
import json
from dataclasses import dataclass, replace

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake


class Writing(fake.FakeTrainer):
    def train(self, step, advantages, minibatches, epochs):
        with open("trained.jsonl", "a") as file:
            for record, advantage in zip(self._records, advantages):
                columns = record.columns
                file.write(json.dumps({
                    "step": step, "ordinal": record.ordinal, "sample": record.sample,
                    "prompt": bytes(columns["prompt_ids"].astype("uint8")).decode(),
                    "text": bytes(columns["text"]).decode(),
                    "actions": len(columns["action_ids"]), "advantage": float(advantage),
                }) + "\\n")
        return super().train(step, advantages, minibatches, epochs)


class Saying(fake.FakeScorer):
    def score(self, records):
        scores = super().score(records)
        return [
            replace(score, reason=f"{record.text.count('a')} of {len(record.text)}")
            for record, score in zip(records, scores)
        ]


@hookimpl
def gcore_rewards():
    yield p.RewardProvider(summary="-", factory="writes:Saying")


@dataclass(frozen=True, kw_only=True)
class Saves(fake.FakeTrainerConfig):
    def traits(self):
        return replace(super().traits(), saves_in_background=True)


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        summary="-", factory="writes:Writing", config=Saves,
    )
'''
TEMPLATE = "{prompt}|{answer}|{reward}"


def refined_job(directory: Path, **changes: Any) -> dict[str, Any]:
    job = runs.job(advantage={"config": {"group_size": 8}}, **changes)
    job["sampling"] = {"use": "refine", "config": {"first": 5, "template": TEMPLATE}}
    job["roles"]["policy"] = {**job["roles"]["policy"], "use": "writes"}
    job["local"] = [str(runs.FAKE), "trouble.py", "writes.py"]
    directory.mkdir(exist_ok=True)
    (directory / "writes.py").write_text(WRITES)
    return job


def groups_trained(directory: Path) -> list[list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in (directory / "trained.jsonl").read_text().splitlines():
        record = json.loads(line)
        groups[record["ordinal"]].append(record)
    return [sorted(group, key=lambda record: record["sample"]) for group in groups.values()]


def reward_of(record: dict[str, Any]) -> float:
    """The fake reward: share of the letter a among the letters, as FakeScorer gives it."""
    return record["text"].count("a") / record["actions"]


def check_groups(directory: Path) -> int:
    """Every refined record has the prompt of row, best draft and its reward, and both parts have a
    baseline of their own; returns how many groups were looked at.
    """
    groups = groups_trained(directory)
    for group in groups:
        assert [record["sample"] for record in group] == list(range(8))
        first, refined = group[:5], group[5:]
        row = first[0]["prompt"]
        assert {record["prompt"] for record in first} == {row}
        (prompt,) = {record["prompt"] for record in refined}
        best = max(first, key=reward_of)
        assert prompt == f"{row}|{best['text']}|{reward_of(best):g}"
        for part in (first, refined):
            mean = sum(map(reward_of, part)) / len(part)
            for record in part:
                assert record["advantage"] == pytest.approx(reward_of(record) - mean, abs=1e-9)
    return len(groups)


@pytest.mark.parametrize("launcher", ["core/inline", "core/local"])
def test_refined_records_train_under_the_prompt_of_their_draft(
    tmp_path: Path, launcher: str
) -> None:
    job = refined_job(tmp_path, launcher={"use": launcher})
    code, run = runs.finish(tmp_path, job)
    assert code == 0, run.output
    assert check_groups(tmp_path) > 4
    steps = [row for row in run.metrics() if "refined_share" in row]
    assert steps
    assert all(row["refined_share"] == 3 / 8 for row in steps)


def test_what_a_reward_said_of_the_draft_stands_in_the_prompt(tmp_path: Path) -> None:
    job = refined_job(tmp_path, launcher={"use": "core/inline"})
    job["sampling"]["config"]["template"] = "{answer}|{critique}"
    job["rewards"] = {"silent": {"use": "fake"}, "says": {"use": "writes"}}
    code, run = runs.finish(tmp_path, job)
    assert code == 0, run.output
    groups = groups_trained(tmp_path)
    assert groups
    for group in groups:
        best = max(group[:5], key=reward_of)
        said = f"{best['text'].count('a')} of {best['actions']}"
        assert {record["prompt"] for record in group[5:]} == {f"{best['text']}|{said}"}


def test_a_group_too_small_for_two_waves_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = refined_job(tmp_path, launcher={"use": "core/inline"})
    job["sampling"]["config"]["first"] = 7
    code, run = runs.finish(tmp_path, job)
    assert code == 2
    assert "7 of 8 records leave less than 2 to be refined" in run.output


def test_the_fake_reward_is_what_this_file_takes_it_for() -> None:
    assert "a" in fake.VOCABULARY
