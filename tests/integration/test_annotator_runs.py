"""A role that gives columns, in real processes and inline: the policy learns from what it gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

TEACHER = '''
"""A role "teacher", whose workers write down what they are shown; one ends in the middle."""
import json, os
from dataclasses import dataclass
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake


class Teacher(fake.FakeAnnotator):
    def annotate(self, records):
        with open("shown.jsonl", "a") as file:
            keys = [[r.ordinal, r.sample] for r in records]
            file.write(json.dumps([os.getpid(), keys]) + "\\n")
        return super().annotate(records)


class Dies(Teacher):
    """The first worker that is asked in the second step is killed."""

    def annotate(self, records):
        given = super().annotate(records)
        if min(r.ordinal for r in records) >= 6 and not os.path.exists("died"):
            Path("died").touch()
            os.kill(os.getpid(), 9)
        return given


@dataclass(frozen=True, kw_only=True)
class NoRewardConfig(fake.FakeAdvantageConfig):
    needs: bool = False

    def traits(self):
        return Traits(works_without_rewards=not self.needs)


@hookimpl
def gcore_advantages():
    yield p.AdvantageProvider(
        summary="-", factory="gcore_testing.fake:FakeAdvantage", config=NoRewardConfig
    )


@hookimpl
def gcore_roles():
    yield p.RoleProvider(
        name="teacher", summary="-", kind="annotator", columns=("teacher_logp",)
    )


@hookimpl
def gcore_annotators():
    for cls in (Teacher, Dies):
        yield p.AnnotatorProvider(
            name=cls.__name__.lower(), summary="-", factory=f"tutor:{cls.__name__}",
            config=fake.FakeAnnotatorConfig,
        )
'''


def with_teacher(use: str = "tutor/teacher", **changes: Any) -> dict[str, Any]:
    toward = {"toward": "teacher_logp"}
    return runs.job(
        roles={
            "policy": {"use": "trouble/recording", "config": toward},
            "teacher": {"use": use, "slots": changes.pop("slots", 1)},
        },
        **changes,
    ) | {"local": [str(runs.FAKE), "trouble.py", "tutor.py"]}


def finished(directory: Path, config: dict[str, Any]) -> runs.Run:
    directory.mkdir(exist_ok=True)
    (directory / "tutor.py").write_text(TEACHER)
    code, run = runs.finish(directory, config)
    assert code == 0, run.output
    return run


def shown(run: runs.Run) -> list[tuple[int, list[list[int]]]]:
    lines = (run.directory / "shown.jsonl").read_text().splitlines()
    return [(pid, keys) for pid, keys in map(json.loads, lines)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    return finished(tmp_path_factory.mktemp("alone"), with_teacher(controller={"shards": 1}))


def test_an_annotator_gets_the_trained_records_and_changes_the_weights(
    alone: runs.Run, tmp_path: Path
) -> None:
    code, without = runs.finish(tmp_path, runs.job(controller={"shards": 1}))
    assert code == 0, without.output
    assert [sorted(keys) for _, keys in shown(alone)] == alone.batches()
    assert alone.batches()[0] == without.batches()[0]
    assert alone.weights() != without.weights()


@pytest.mark.parametrize(
    "changes",
    [{"controller": {"shards": 2}, "slots": 2}, {"launcher": {"use": "core/inline"}}],
    ids=["two-shards-two-workers", "inline"],
)
def test_shards_workers_and_launcher_do_not_change_annotated_weights(
    changes: dict[str, Any], alone: runs.Run, tmp_path: Path
) -> None:
    run = finished(tmp_path, with_teacher(**changes))
    assert (run.batches(), run.weights()) == (alone.batches(), alone.weights())


@pytest.mark.protects
def test_a_killed_annotator_is_restarted_and_asked_again(alone: runs.Run, tmp_path: Path) -> None:
    run = finished(tmp_path, with_teacher("tutor/dies", controller={"shards": 1}))
    assert "teacher.0 ended with signal SIGKILL; it is started again" in run.output
    assert (run.batches(), run.weights()) == (alone.batches(), alone.weights())
    pids = [pid for pid, _ in shown(run)]
    assert len(set(pids)) == 2 and len(pids) == len(run.batches()) + 1


def test_a_run_without_rewards_learns_from_the_annotator(alone: runs.Run, tmp_path: Path) -> None:
    """Its two shards draw what a run with rewards draws, and other weights come of it."""
    job = with_teacher(controller={"shards": 2}, advantage={"use": "tutor"})
    del job["rewards"]
    run = finished(tmp_path, job)
    assert run.batches()[0] == alone.batches()[0]
    assert run.weights() != alone.weights()
    assert all("reward" not in row for row in run.metrics())
    assert len(run.metrics()) == len(alone.metrics())


def test_an_advantage_of_rewards_is_refused_without_any(tmp_path: Path) -> None:
    job = with_teacher(advantage={"use": "tutor", "config": {"needs": True}})
    del job["rewards"]
    (tmp_path / "tutor.py").write_text(TEACHER)
    code, run = runs.finish(tmp_path, job)
    assert code == 2
    assert (
        "rewards: there is none, and advantage tutor is computed from rewards under these "
        "settings; add rewards.<name>." in " ".join(run.output.split())
    )
