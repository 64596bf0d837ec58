"""A role that is trained beside the policy, in real processes and inline, with fakes: it gives
columns by the weights that a step begins with, and is prepared, trained, saved and loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

COACH = '''
"""A role "coach", whose log-probs the policy is drawn to; it learns too, and notes its calls."""
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake

ABLE = frozenset({"advantages.action", "annotate"})


class Coach(fake.FakeTrainer):
    def note(self, *what):
        with open("coach.jsonl", "a") as file:
            file.write(json.dumps([*what, self.version]) + "\\n")

    def annotate(self, records):
        self.note("annotate", [[r.ordinal, r.sample] for r in records])
        return super().annotate(records)

    def prepare(self, records, scalars):
        assert all("coach_logp" in r.columns for r in records)
        self.note("prepare", [[r.ordinal, r.sample, r.minibatch] for r in records], os.getpid())
        return super().prepare(records, scalars)

    def train(self, step, advantages, minibatches, epochs):
        self.note("train", advantages.tolist(), minibatches, epochs)
        return super().train(step, advantages, minibatches, epochs)

    def skip(self, step):
        self.note("skip")
        super().skip(step)


class Policy(fake.FakeTrainer):
    def train(self, step, *given):
        with open("trained.jsonl", "a") as file:
            file.write(json.dumps([step, given[0].tolist()]) + "\\n")
        return super().train(step, *given)


class NotFinite(Coach):
    def annotate(self, records):
        nan = np.float32("nan")
        return [{"coach_logp": own["coach_logp"] * nan} for own in super().annotate(records)]


class Dies(Coach):
    """The first process that annotates with version 2 is killed before it answers."""

    def annotate(self, records):
        columns = super().annotate(records)
        if self.version == 2 and not os.path.exists("died"):
            Path("died").touch()
            os.kill(os.getpid(), 9)
        return columns


class Level:
    """Leaves advantages to ranks, which here take a record's reward for each of its actions."""

    requires = frozenset({"coach_logp"})

    def __init__(self, config):
        self.group_size = 4

    def per_action(self, record):
        raise NotImplementedError

    statistics = of = per_action


@dataclass(frozen=True, kw_only=True)
class DrawnConfig:
    names: tuple[str, ...] = ("coach_logp",)

    def traits(self):
        return Traits(requires=frozenset(self.names))


@hookimpl
def gcore_roles():
    yield p.RoleProvider(
        name="coach", summary="-", kind="trainer", columns=("coach_logp",), objective="coach/any"
    )


@hookimpl
def gcore_trainers():
    for cls in (Coach, Policy, NotFinite, Dies):
        yield p.TrainerProvider(
            name=cls.__name__.lower(), summary="-", factory=f"coach:{cls.__name__}",
            config=fake.FakeTrainerConfig, capabilities=ABLE,
        )


@hookimpl
def gcore_objectives():
    loss = "gcore_testing.fake:FakeObjective"
    yield p.ObjectiveProvider(name="any", summary="-", factory=loss)
    yield p.ObjectiveProvider(name="drawn", summary="-", factory=loss, config=DrawnConfig)


@hookimpl
def gcore_advantages():
    yield p.AdvantageProvider(
        name="level", summary="-", factory="coach:Level", level="action", config=DrawnConfig
    )
'''


def with_coach(use: str = "coach/coach", **changes: Any) -> dict[str, Any]:
    toward = {"toward": "coach_logp"}
    coach = {"use": use, "minibatches": 2, "epochs": 2, **changes.pop("coach", {})}
    return runs.job(
        roles={"policy": {"use": "coach/policy", "config": toward}, "coach": coach},
        objective={"use": "coach/drawn"},
        **changes,
    ) | {"local": [str(runs.FAKE), "trouble.py", "coach.py"]}


def finished(directory: Path, config: dict[str, Any]) -> runs.Run:
    directory.mkdir(exist_ok=True)
    (directory / "coach.py").write_text(COACH)
    code, run = runs.finish(directory, config)
    assert code == 0, run.output
    return run


def calls(run: runs.Run) -> list[list[Any]]:
    return [json.loads(line) for line in (run.directory / "coach.jsonl").read_text().splitlines()]


def trained(run: runs.Run) -> list[list[Any]]:
    return [json.loads(line) for line in (run.directory / "trained.jsonl").read_text().splitlines()]


def coach_weights(run: runs.Run) -> list[float]:
    return list(json.loads((run.path / "weights-coach" / "logits.json").read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    return finished(tmp_path_factory.mktemp("alone"), with_coach(controller={"shards": 1}))


def test_a_learner_gives_columns_before_it_trains_and_trains_its_own_way(alone: runs.Run) -> None:
    own = calls(alone)
    steps = len(trained(alone))
    assert steps > 1
    assert [call[0] for call in own] == ["annotate", "prepare", "train"] * steps
    assert [call[-1] for call in own] == [step for step in range(steps) for _ in range(3)]
    for annotate, prepare, train in zip(own[::3], own[1::3], own[2::3], strict=True):
        assert [key[:2] for key in prepare[1]] == sorted(annotate[1])
        assert {key[2] for key in prepare[1]} == {0, 1}
        assert train[2:4] == [2, 2]
    assert [call[1] for call in own[2::3]] == [advantages for _, advantages in trained(alone)]
    assert coach_weights(alone) != alone.weights()
    metrics = alone.metrics()[-1]
    assert metrics["coach/loss"] != metrics["loss"]


@pytest.mark.parametrize(
    "changes",
    [{"controller": {"shards": 2}}, {"launcher": {"use": "core/inline"}}],
    ids=["two-shards", "inline"],
)
def test_shards_and_launcher_do_not_change_what_a_learner_learns(
    changes: dict[str, Any], alone: runs.Run, tmp_path: Path
) -> None:
    run = finished(tmp_path, with_coach(**changes))
    assert run.weights() == alone.weights()
    assert coach_weights(run) == coach_weights(alone)


def test_a_resumed_run_goes_on_with_what_the_learner_held(alone: runs.Run, tmp_path: Path) -> None:
    steps = len(trained(alone))
    job = with_coach(controller={"shards": 1}, checkpoint={"every": 1})
    run = finished(tmp_path, job | {"run": {**job["run"], "steps": steps - 1}})
    assert len(trained(run)) == steps - 1
    words = f"-m gcore_core resume {run.path} run.steps={steps} launcher.config.socket_dir=/tmp"
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=run.directory,
        env={**os.environ, "PYTHONPATH": str(runs.REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=runs.PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.weights() == alone.weights()
    assert coach_weights(run) == coach_weights(alone)


def latest_of(run: runs.Run, call: str) -> dict[int, list[Any]]:
    """Version of the coach -> what its latest call with that version was about."""
    return {version: about for name, *about, version in calls(run) if name == call}


@pytest.mark.protects
def test_a_learner_that_is_killed_while_it_annotates_changes_no_record_and_no_weight(
    alone: runs.Run, tmp_path: Path
) -> None:
    job = with_coach("coach/dies", controller={"shards": 1}, checkpoint={"every": 1, "restarts": 1})
    run = finished(tmp_path, job)
    assert (tmp_path / "died").exists()
    annotated = [call[-1] for call in calls(run) if call[0] == "annotate"]
    assert annotated.count(2) == 2
    assert {v: about[0] for v, about in latest_of(run, "prepare").items()} == {
        v: about[0] for v, about in latest_of(alone, "prepare").items()
    }
    assert latest_of(run, "train") == latest_of(alone, "train")
    assert dict(trained(run)) == dict(trained(alone))
    assert run.weights() == alone.weights()
    assert coach_weights(run) == coach_weights(alone)


def test_a_learner_whose_objective_needs_groups_gets_all_records_of_a_group_on_one_rank(
    tmp_path: Path,
) -> None:
    objective = {"use": "coach/drawn", "config": {"names": ["coach_logp", "group"]}}
    run = finished(tmp_path, with_coach(coach={"slots": 2, "objective": objective}))
    ranks_of_groups: dict[int, set[int]] = {}
    for _, records, rank, _ in (call for call in calls(run) if call[0] == "prepare"):
        for ordinal, _, _ in records:
            ranks_of_groups.setdefault(ordinal, set()).add(rank)
    assert len(set.union(*ranks_of_groups.values())) == 2
    assert {len(ranks) for ranks in ranks_of_groups.values()} == {1}


def test_in_a_head_start_only_the_learner_trains(tmp_path: Path) -> None:
    job = with_coach(coach={"head_start": 2}, advantage={"use": "coach/level"})
    run = finished(tmp_path, job)
    steps = [step for step, _ in trained(run)]
    assert steps == list(range(2, job["run"]["steps"]))
    assert [call[0] for call in calls(run)].count("train") == job["run"]["steps"]
    rows = run.metrics()[1:]
    assert ["loss" in row for row in rows] == [False, False, *[True] * len(steps)]
    assert all("coach/loss" in row for row in rows)
    # Ranks get rewards, which here lie between 0 and 1; advantages would have a mean of 0.
    assert all(0 <= reward <= 1 for _, rewards in trained(run) for reward in rewards)


def test_columns_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "coach.py").write_text(COACH)
    code, run = runs.finish(tmp_path, with_coach("coach/notfinite"))
    assert code != 0
    assert "column 'coach_logp' is not finite" in run.output
