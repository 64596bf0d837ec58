"""Runs in real processes whose samples go on through a push over what is cached of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.test_resume import resume
from tests.support import runs

pytestmark = pytest.mark.rest

STEPS = 6
PROMPTS = 6
AGE = 4

#: An engine whose log-probs depend on the weights that have read what it has cached, and which
#: writes down how many tokens a push has it read again. Over a cache of the weights that sample
#: they are those of the table, as the trainer's are. Where a test has laid the file ``hold``,
#: samples of all steps but the first wait for a push, so that one cuts them, unless it was given
#: back. And a trainer that checks log-probs.
CACHED = '''
import json
import os
import time

import numpy as np

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.columns import action_versions
from gcore_core.testing import fake

CAN = {"abort", "continues", "logprobs", "sleep", "weights.fingerprint", "weights.push"}


class Cached(fake.FakeGenerator):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._reads = {}  # key of a running sample -> the logits that held as each token was read

    def step(self):
        time.sleep(0.003)
        running, weights = self._running, self._logits
        if not running or not weights.size:
            return super().step()
        ended = []
        for key, one in running.items():
            if self._waits(key, *one):
                continue
            reads = self._reads.setdefault(key, [])
            reads += [weights] * (1 + len(one[1]) - len(reads))
            self._running = {key: one}
            self._logits = ((weights + np.mean(reads, axis=0)) / 2).astype(np.float32)
            ended += super().step()
            self._logits = weights
        over = {(record.request.ordinal, record.request.sample) for record in ended}
        self._running = {key: one for key, one in running.items() if key not in over}
        self._reads = {key: reads for key, reads in self._reads.items() if key in self._running}
        return ended

    def _waits(self, key, request, letters):
        """Whether a sample has some letters, and no push has come since its first one."""
        drawn = self._begun.get(key, [])
        if request.greedy or request.piece is not None or key[0] < 6 or len(drawn) < 5:
            return False
        if not os.path.exists("hold"):
            return False
        return drawn[0][0] == self.version

    def abort(self, keys):
        for key in keys:
            self._reads.pop(tuple(key), None)
        return super().abort(keys)

    def sleep(self):
        super().sleep()
        self._reads = {}

    def commit_weights(self, plan):
        super().commit_weights(plan)
        again = 0 if plan.keeps else sum(map(len, self._reads.values()))
        if not plan.keeps:
            self._reads = {}
        with open("again.jsonl", "a") as file:
            file.write(json.dumps([plan.version, plan.keeps, len(self._running), again]) + "\\n")


class Checks(fake.FakeTrainer):
    """Of each action that is not behind a cut, the log-prob is that of the weights it names."""

    def prepare(self, records, scalars):
        np.save(f"table-{self.version}", fake.log_softmax(self._logits))
        kept = 0
        for record in records:
            columns = record.columns
            actions = columns["action_ids"]
            versions = action_versions(columns, len(actions), record.version)
            expected = self._tables(versions)[np.arange(len(actions)), actions]
            gaps = np.abs(expected - columns["logp"])
            assert gaps[versions == record.version].max() < 1e-5, "not its log-probs"
            kept += int((gaps[versions > record.version] > 1e-4).sum())
        with open("steps.jsonl", "a") as file:
            ordinals = sorted({record.ordinal for record in records})
            file.write(json.dumps([self.version, ordinals, kept]) + "\\n")
        return super().prepare(records, scalars)

    def _tables(self, versions):
        return np.stack([np.load(f"table-{version}.npy") for version in versions.tolist()])


def cached(name, *more):
    return p.GeneratorProvider(
        name=name, summary="-", factory="cached:Cached", config=fake.FakeGeneratorConfig,
        capabilities=frozenset({*CAN, *more}),
    )


@hookimpl
def gcore_generators():
    yield cached("keeps", "weights.midway", "weights.midway.keep")
    yield cached("reads", "weights.midway")


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        name="checks", summary="-", factory="cached:Checks", config=fake.FakeTrainerConfig,
        capabilities=next(iter(fake.gcore_trainers())).capabilities,
    )
'''


def config(directory: Path, midway: str = "keep", **changes: Any) -> dict[str, Any]:
    """Returns a job, and writes its providers into the run's directory."""
    bounds = {"prompts": PROMPTS, "ahead": 1, "age": AGE, "midway": midway}
    sections: dict[str, Any] = {
        "controller": {"use": "async", "shards": 2, "config": bounds},
        "objective": {"use": "algorithms/ppo_clip"},
        "run": {"steps": STEPS},
        "checkpoint": {"every": 1, "restarts": 9},
        "roles": {
            "policy": {"use": "cached/checks"},
            "rollout": {
                "use": "cached/keeps",
                "slots": 2,
                "config": {"max_new_tokens": 200, "late_end": 150},
            },
        },
    }
    for name, part in changes.items():
        sections[name] = {**sections.get(name, {}), **part}
    job = runs.job(**sections)
    job["local"].append("cached.py")
    directory.mkdir(exist_ok=True)
    (directory / "cached.py").write_text(CACHED)
    return job


def lines(directory: Path, name: str) -> list[Any]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def check_whole(run: Any, directory: Path) -> None:
    """Every group was trained on once, and none too late; a step that was made twice counts as it
    was made last.
    """
    taken = {step: ordinals for step, ordinals, _ in lines(directory, "steps.jsonl")}
    trained = [ordinal for ordinals in taken.values() for ordinal in ordinals]
    assert sorted(trained) == list(range(PROMPTS * STEPS))
    rows = {row["step"]: row for row in run.metrics()}
    assert sorted(rows) == list(range(STEPS + 1))
    assert max(row.get("age/largest", 0) for row in rows.values()) <= AGE


@pytest.mark.parametrize("midway", ["keep", "recompute"])
def test_nothing_is_read_again_where_caches_are_kept(midway: str, tmp_path: Path) -> None:
    """Log-probs behind a cut are then those of no version. Nobody takes that for a wrong engine:
    canaries, which no push cuts, agree, and so do records of one version.
    """
    (tmp_path / "hold").touch()
    code, run = runs.finish(tmp_path, config(tmp_path, midway))
    assert code == 0, run.output
    check_whole(run, tmp_path)
    pushes = lines(tmp_path, "again.jsonl")
    assert sum(running for _, _, running, _ in pushes) > 0, "no push came while samples ran"
    assert {keeps for _, keeps, _, _ in pushes} == {midway == "keep"}
    assert (sum(again for *_, again in pushes) == 0) == (midway == "keep")
    kept = sum(kept for *_, kept in lines(tmp_path, "steps.jsonl"))
    assert (kept > 0) == (midway == "keep")
    rows = run.metrics()[1:]
    assert max(row["age/spanning_share"] for row in rows) > 0
    assert sum(row.get("sentinel/canary_actions", 0) for row in rows) > 0
    assert max(row.get("logprob_gap_max", 0.0) for row in rows) < 1e-3


def test_kills_lose_nothing_where_caches_are_kept(tmp_path: Path) -> None:
    """A replica that is started again draws its samples anew; after another process the run goes on
    from a checkpoint.
    """
    with runs.running(tmp_path, config(tmp_path)) as run:
        for step, victim in enumerate(("rollout.0", "controller.1", "rollout.1"), 1):
            run.read_until(f"step {step}/{STEPS}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pids()[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    check_whole(run, tmp_path)


def test_what_is_given_back_before_a_checkpoint_is_read_by_whoever_goes_on(tmp_path: Path) -> None:
    """A cache is in no checkpoint. So these samples are read again, under the weights of then."""
    job = config(tmp_path)
    job["controller"]["config"]["unfinished"] = "keep"
    (tmp_path / "hold").touch()
    with runs.running(tmp_path, job) as run:
        run.read_until(f"step 3/{STEPS}")
        run.process.kill()
    (tmp_path / "hold").unlink()
    done = resume(SimpleNamespace(path=run.path, directory=tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    check_whole(run, tmp_path)
    assert any(row.get("window/went_on") for row in run.metrics())


@pytest.mark.parametrize(
    ("changes", "bounds", "told"),
    [
        (
            {"roles": {"rollout": {"use": "cached/reads"}}},
            {},
            "cached/reads is not known to go on with samples over what older weights have cached",
        ),
        (
            {"run": {"deterministic": True}},
            {},
            "controller.config.midway: a deterministic run cannot",
        ),
        (
            {"objective": {"use": "fake"}},
            {},
            "fake does not correct for actions that older weights",
        ),
        ({}, {"replay": "."}, "replay does not go with midway"),
    ],
    ids=["claim", "deterministic", "stale", "replay"],
)
def test_check_refuses_what_cannot_keep_caches(
    changes: dict[str, Any], bounds: dict[str, Any], told: str, tmp_path: Path
) -> None:
    job = config(tmp_path, **changes)
    job["controller"]["config"] |= bounds
    answer = runs.checked(tmp_path, job)
    assert not answer.startswith("0 ") and told in answer, answer


def test_check_accepts_kept_caches(tmp_path: Path) -> None:
    answer = runs.checked(tmp_path, config(tmp_path))
    assert answer.startswith("0 "), answer
