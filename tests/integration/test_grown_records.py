"""Answers that grow in steps, in runs of real processes."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

WRITES = '''
"""A trainer that writes down what it is given of each record."""
import json

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.testing import fake


class Writing(fake.FakeTrainer):
    def train(self, step, advantages, minibatches, epochs):
        with open("trained.jsonl", "a") as file:
            for record, advantage in zip(self._records, advantages):
                columns = record.columns
                file.write(json.dumps({
                    "step": step, "ordinal": record.ordinal, "sample": record.sample,
                    "prompt": columns["prompt_ids"].tolist(), "text": bytes(columns["text"]).decode(),
                    "actions": columns["action_ids"].tolist(), "mask": columns["action_mask"].tolist(),
                    "logp": columns["logp"].tolist(), "advantage": float(advantage),
                }) + "\\n")
        return super().train(step, advantages, minibatches, epochs)


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        summary="-", factory="writes:Writing", config=fake.FakeTrainerConfig,
        capabilities=frozenset({"save.background"}),
    )
'''  # noqa: E501
STEPS, BEAMS, WIDTH, ACTIONS = 3, 2, 2, 2
WAVE = BEAMS * WIDTH
GROUP = STEPS * WAVE


def tree_job(directory: Path, **changes: Any) -> dict[str, Any]:
    job = runs.job(
        run={"steps": 3, "deterministic": True},
        advantage={"config": {"group_size": GROUP}},
        checkpoint={"every": 1},
        **changes,
    )
    settings = {"steps": STEPS, "beams": BEAMS, "width": WIDTH, "actions": ACTIONS, "end": ""}
    job["sampling"] = {"use": "tree", "config": settings}
    job["roles"]["policy"] = {**job["roles"]["policy"], "use": "writes"}
    job["local"] = [str(runs.FAKE), "trouble.py", "writes.py"]
    directory.mkdir(exist_ok=True)
    (directory / "writes.py").write_text(WRITES)
    return job


def groups_trained(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Returns ordinal -> its records by sample; of a step that was made twice, the latest."""
    groups: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in (directory / "trained.jsonl").read_text().splitlines():
        record = json.loads(line)
        groups[record["ordinal"]][record["sample"]] = record
    return {ordinal: [group[s] for s in sorted(group)] for ordinal, group in groups.items()}


def reward_of(record: dict[str, Any]) -> float:
    """The fake reward: share of the letter a among the letters, as FakeScorer gives it."""
    return record["text"].count("a") / len(record["actions"])


def is_open(record: dict[str, Any]) -> bool:
    """Whether it was drawn as a step, and neither ended nor became as long as answers may be."""
    return (
        record["sample"] < GROUP - WAVE and "." not in record["text"] and len(record["actions"]) < 8
    )


def check_tree(group: list[dict[str, Any]]) -> int:
    """Looks at the records of a group: each continues one that the search had to keep, trains its
    own actions alone, and is compared with those that begin alike. Returns its continuations.
    """
    assert [record["sample"] for record in group] == list(range(GROUP))
    assert all(record["prompt"] == group[0]["prompt"] for record in group)
    drafts = [-1] * WAVE
    for wave in range(1, STEPS):
        drafts += kept(group[: wave * WAVE])
    for record, draft in zip(group, drafts, strict=True):
        begun = group[draft]["actions"] if draft >= 0 else []
        drawn = len(record["actions"]) - len(begun)
        assert record["actions"][: len(begun)] == begun
        assert record["mask"] == [0] * len(begun) + [1] * drawn
        assert not any(record["logp"][: len(begun)])
        assert all(record["logp"][len(begun) :]), "an action that was drawn has no log-prob"
        assert drawn <= ACTIONS or record["sample"] >= GROUP - WAVE
    for draft in set(drafts):
        siblings = [record for record, own in zip(group, drafts, strict=True) if own == draft]
        mean = sum(map(reward_of, siblings)) / len(siblings)
        for record in siblings:
            assert record["advantage"] == pytest.approx(reward_of(record) - mean, abs=1e-9)
    return sum(draft >= 0 for draft in drafts)


def kept(drawn: list[dict[str, Any]]) -> list[int]:
    """The drafts of the next wave: the best open records of the latest wave that has any."""
    for start in range(len(drawn) - WAVE, -1, -WAVE):
        if still_open := [record for record in drawn[start : start + WAVE] if is_open(record)]:
            best = sorted(still_open, key=lambda record: (-reward_of(record), record["sample"]))
            names = [record["sample"] for record in best[:BEAMS]]
            return [names[place % len(names)] for place in range(WAVE)]
    return [-1] * WAVE


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """The trees of a run in one process."""
    directory = tmp_path_factory.mktemp("calm")
    job = tree_job(directory, launcher={"use": "core/inline"}, controller={"shards": 1})
    code, run = runs.finish(directory, job)
    assert code == 0, run.output
    return groups_trained(directory)


def test_records_of_a_tree_train_their_own_actions_and_are_compared_with_their_siblings(
    calm: dict[int, list[dict[str, Any]]],
) -> None:
    assert sum(check_tree(group) for group in calm.values()) > 4 * WAVE


def test_a_tree_is_the_same_for_other_numbers_of_processes_and_after_a_kill(
    calm: dict[int, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Two controllers and two replicas of the generator, one of which is killed with a controller.

    The run goes on from its checkpoint, and draws the trees of the step anew.
    """
    job = tree_job(tmp_path, controller={"shards": 2})
    with runs.running(tmp_path, job, "roles.rollout.slots=2") as run:
        run.read_until("step 1/3")
        os.kill(run.pids()["rollout.1"], signal.SIGKILL)
        os.kill(run.pids()["controller.1"], signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert "the run goes on from step" in run.output
    assert groups_trained(tmp_path) == calm


def test_a_group_that_is_no_tree_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = tree_job(tmp_path, launcher={"use": "core/inline"})
    job["advantage"]["config"]["group_size"] = GROUP + 1
    code, run = runs.finish(tmp_path, job)
    assert code == 2
    assert f"a tree has {GROUP} records, and a group has {GROUP + 1}" in run.output


def test_a_generator_of_whole_answers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = tree_job(tmp_path, launcher={"use": "core/inline"})
    job["roles"]["rollout"]["use"] = "trouble/pictures"
    code, run = runs.finish(tmp_path, job)
    assert code == 2
    assert "draws whole answers" in run.output
