"""Runs in real processes that lend the trainer's devices to a generator that sleeps there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

pytestmark = pytest.mark.rest

STEPS = 6

#: An engine that takes its time, so that the trainer waits; answers of all lengths. A trainer that
#: checks what it gets, and writes it down.
SLOW = """
import json
import time

import numpy as np

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.testing import fake


class Slow(fake.FakeGenerator):
    def step(self):
        time.sleep(0.004)
        return super().step()


class Writes(fake.FakeTrainer):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._tables = {0: fake.log_softmax(self._logits)}

    def prepare(self, records, scalars):
        self._tables[self.version] = fake.log_softmax(self._logits)
        for record in records:
            columns = record.columns
            tables = np.array([t[columns["action_ids"]] for t in self._tables.values()])
            assert np.abs(tables - columns["logp"]).min(axis=0).max() < 1e-5, "not its log-probs"
            assert columns["action_mask"].all(), "an action is not trained on"
        with open("steps.jsonl", "a") as file:
            keys = [[r.ordinal, r.sample] for r in records]
            file.write(json.dumps([self.version, keys]) + "\\n")
        return super().prepare(records, scalars)


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(
        name="slow", summary="-", factory="slow:Slow", config=fake.FakeGeneratorConfig,
        capabilities=frozenset(
            {"abort", "continues", "logprobs", "sleep", "weights.fingerprint", "weights.midway"}
            | {"weights.push"}
        ),
    )


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        name="writes", summary="-", factory="slow:Writes", config=fake.FakeTrainerConfig
    )
"""


def config(ahead: int = 0, lent: int = 1, **changes: Any) -> dict[str, Any]:
    bounds = {"prompts": 6, "ahead": ahead, "age": 4, "midway": "recompute"}
    sections: dict[str, Any] = {
        "controller": {"use": "async", "shards": 2, "config": bounds},
        "objective": {"use": "algorithms/ppo_clip"},
        "run": {"steps": STEPS},
        "checkpoint": {"every": 1},
        "roles": {
            "policy": {"use": "slow/writes"},
            "rollout": {
                "use": "slow/slow",
                "slots": 2 + lent,
                "lent": lent,
                "config": {"max_new_tokens": 400, "late_end": 300},
            },
        },
    }
    for name, part in changes.items():
        sections[name] = {**sections.get(name, {}), **part}
    job = runs.job(**sections)
    job["local"].append("slow.py")
    return job


def finish(directory: Path, job: dict[str, Any]) -> Any:
    (directory / "slow.py").write_text(SLOW)
    code, run = runs.finish(directory, job)
    assert code == 0, run.output
    return run


def trained_on(directory: Path) -> list[tuple[int, int]]:
    """Returns the records of all steps; of one that was made twice, those of the later time."""
    lines = (directory / "steps.jsonl").read_text().splitlines()
    steps = dict(json.loads(line) for line in lines)
    return [(ordinal, sample) for keys in steps.values() for ordinal, sample in keys]


def total(run: Any, name: str) -> float:
    return float(sum(row[name] for row in run.metrics()[1:]))


def test_a_run_lends_and_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Samples go on at the lent replica, and the trainer finds their log-probs right."""
    run = finish(tmp_path, config())
    records = trained_on(tmp_path)
    assert len(records) == len(set(records)) == STEPS * 6 * 4
    assert total(run, "lending/loans") > 0
    assert total(run, "lending/seconds") > 0
    assert total(run, "lending/samples") > 0
    assert max(row["age/largest"] for row in run.metrics()[1:]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_goes_on_when_replicas_are_killed_while_it_lends(ahead: int, tmp_path: Path) -> None:
    """The lent one and one of the others, also while the lent one sleeps."""
    (tmp_path / "slow.py").write_text(SLOW)
    job = config(ahead, run={"steps": 8}, checkpoint={"every": 1, "restarts": 9})
    with runs.running(tmp_path, job) as run:
        for step, victim in ((2, "rollout.2"), (4, "rollout.0"), (6, "rollout.2")):
            run.read_until(f"step {step}/8")
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pids()[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    records = trained_on(tmp_path)
    assert len(records) == len(set(records)) == 8 * 6 * 4
    assert total(run, "lending/loans") > 0
    assert max(row["age/largest"] for row in run.metrics()[1:]) <= 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"run": {"deterministic": True}}, "run.deterministic is true, and the clock would decide"),
        ({"controller": {"use": "core/sync"}}, "controller core/sync lends none"),
        ({"controller": {"replicas": "owned"}}, "controller.replicas is owned"),
        ({"sampling": {"use": "refine"}}, "draws records in waves or pieces"),
        ({"roles": {"rollout": {"use": "trouble/gap", "slots": 3, "lent": 1}}}, "no capability"),
        ({"roles": {"rollout": {"use": "fake", "slots": 1, "lent": 1}}}, "has 1 replicas"),
        ({"roles": {"policy": {"use": "fake", "lent": 1}}}, "only replicas of roles.rollout"),
    ],
    ids=["deterministic", "sync", "owned", "waves", "generator", "none of its own", "a trainer"],
)
def test_check_refuses_what_cannot_be_lent(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    roles = {"policy": {"use": "fake"}, "rollout": {"use": "fake", "slots": 3, "lent": 1}}
    job = runs.job(
        controller={"use": "async", "config": {"prompts": 6}},
        objective={"use": "algorithms/ppo_clip"},
        roles=roles,
    )
    assert runs.checked(tmp_path, job).startswith("0 ")
    for name, part in changes.items():
        job[name] = {**job.get(name, {}), **part}
    if changes.get("controller", {}).get("use") == "core/sync":
        job["objective"] = {"use": "fake"}
    answer = runs.checked(tmp_path, job)
    assert not answer.startswith("0 ") and told in answer, answer


@pytest.mark.slow
def test_the_trainer_agrees_on_log_probs_of_records_that_two_engines_sampled(
    tmp_path: Path,
) -> None:
    """With a model, whose records are fresh: so the trainer's log-probs must be the engines'."""
    pytest.importorskip("gcore_torch")
    words = ["controller.use=async", "controller.config.ahead=0", "controller.config.prompts=512"]
    words += ["run.steps=3", "roles.rollout.slots=2", "roles.rollout.lent=1"]
    told = runs.rows_of_recipe("quickstart", tmp_path, *words, timeout_s=600)
    rows = [row["metrics"] for row in told[1:]]
    assert sum(row["lending/samples"] for row in rows) > 0
    assert max(row["age/largest"] for row in rows) == 0
    assert max(row["logprob_gap_max"] for row in rows) < 1e-3
