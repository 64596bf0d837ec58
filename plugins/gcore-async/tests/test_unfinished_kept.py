"""Runs in real processes whose checkpoints hold what unfinished samples have, and go on with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gcore_core.contract.records import GIVEN_BACK, Header
from gcore_core.run.checkpoint_service import UNFINISHED
from gcore_core.runtime.store.columns import Chunk
from tests.integration.test_resume import resume
from tests.support import runs

pytestmark = pytest.mark.rest

STEPS = 6
PROMPTS = 6
SAMPLES = 4
AGE = 4

#: An engine that takes its time, so that samples run when a checkpoint is made. A trainer that
#: checks log-probs, also against weights of before a restart, and writes down its records.
SLOW = """
import glob
import json
import time

import numpy as np

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.testing import fake

CAN = {"logprobs", "sleep", "weights.fingerprint", "weights.midway", "weights.push"}


class Slow(fake.FakeGenerator):
    def step(self):
        time.sleep(0.003)
        return super().step()


class Writes(fake.FakeTrainer):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._rank = context.rank

    def prepare(self, records, scalars):
        if self._rank == 0:  # its weights are pushed; fake ranks do not share theirs
            np.save(f"table-{self.version}", fake.log_softmax(self._logits))
            tables = [np.load(file) for file in glob.glob("table-*.npy")]
        drawn = []
        for record in records:
            columns = record.columns
            if self._rank == 0:
                gaps = [table[columns["action_ids"]] - columns["logp"] for table in tables]
                assert np.abs(gaps).min(axis=0).max() < 1e-5, "not its log-probs"
            assert columns["action_mask"].all(), "an action is not trained on"
            actions = columns["action_ids"].tolist()
            key = [record.ordinal, record.sample, record.version]
            drawn.append([*key, actions, columns["logp"].tobytes().hex()])
        with open("steps.jsonl", "a") as file:
            file.write(json.dumps([self.version, self._rank, drawn]) + "\\n")
        return super().prepare(records, scalars)


def slow(name, *more):
    return p.GeneratorProvider(
        name=name, summary="-", factory="slow:Slow", config=fake.FakeGeneratorConfig,
        capabilities=frozenset({*CAN, *more}),
    )


@hookimpl
def gcore_generators():
    yield slow("slow", "abort", "continues")
    yield slow("starts", "abort")
    yield slow("ends", "continues")


class Tardy(fake.FakeScorer):
    def score(self, records):
        time.sleep(0.2)
        return super().score(records)


@hookimpl
def gcore_rewards():
    yield p.RewardProvider(name="tardy", summary="-", factory="slow:Tardy")


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        name="writes", summary="-", factory="slow:Writes", config=fake.FakeTrainerConfig
    )
"""


def config(directory: Path, **changes: Any) -> dict[str, Any]:
    """Returns a job, and writes its providers into the run's directory."""
    bounds = {"prompts": PROMPTS, "ahead": 2, "age": AGE, "midway": "recompute"}
    sections: dict[str, Any] = {
        "controller": {"use": "async", "shards": 2, "config": {**bounds, "unfinished": "keep"}},
        "objective": {"use": "algorithms/ppo_clip"},
        "run": {"steps": STEPS},
        "checkpoint": {"every": 1},
        "roles": {
            "policy": {"use": "slow/writes"},
            "rollout": {
                "use": "slow/slow",
                "slots": 2,
                "config": {"max_new_tokens": 400, "late_end": 300},
            },
        },
    }
    for name, part in changes.items():
        sections[name] = {**sections.get(name, {}), **part}
    job = runs.job(**sections)
    job["local"].append("slow.py")
    directory.mkdir(exist_ok=True)
    (directory / "slow.py").write_text(SLOW)
    return job


@dataclass(frozen=True)
class Trained:
    """Holds what a trainer got: the version that began a record, its actions and log-probs."""

    version: int
    actions: list[int]
    logp: bytes


def trained(directory: Path) -> dict[tuple[int, int], list[tuple[int, Trained]]]:
    """Returns (ordinal, sample) -> (step, record) each time that a step trained on it.

    Of a step that was made twice, the later time counts.
    """
    parts = {}
    for line in (directory / "steps.jsonl").read_text().splitlines():
        step, rank, records = json.loads(line)
        parts[step, rank] = records
    given: dict[tuple[int, int], list[tuple[int, Trained]]] = {}
    for (step, _), records in parts.items():
        for ordinal, sample, version, actions, logp in records:
            one = Trained(version, actions, bytes.fromhex(logp))
            given.setdefault((ordinal, sample), []).append((step, one))
    return given


def headers_in(checkpoint: Path) -> list[Header]:
    """Returns the headers of a checkpoint's part of unfinished groups."""
    raw = (checkpoint / UNFINISHED / "headers.msgpack").read_bytes()
    return msgspec.msgpack.decode(raw, type=list[Header])


def begun_in(checkpoint: Path) -> dict[tuple[int, int], Trained]:
    """Returns (ordinal, sample) -> what a checkpoint has of an unfinished sample."""
    headers = headers_in(checkpoint)
    chunk = Chunk(memoryview((checkpoint / UNFINISHED / "columns").read_bytes()))
    begun = {}
    for header in headers:
        if header.status == GIVEN_BACK:
            columns = chunk[header.slot]
            logp = columns["logp"].tobytes()
            begun[header.key] = Trained(header.versions[0], columns["action_ids"].tolist(), logp)
    return begun


def newest(run: Any) -> tuple[int, Path]:
    """Returns the step of a run's newest whole checkpoint, and its directory."""
    manifests = sorted((run.path / "checkpoints").glob("step-*/manifest.json"))
    path = max(file.parent for file in manifests if not file.parent.suffix)
    return int(path.name[5:]), path


def killed(directory: Path, job: dict[str, Any]) -> Any:
    """A run whose supervisor is killed behind step 3, with samples in flight."""
    with runs.running(directory, job) as run:
        run.read_until(f"step 3/{STEPS}")
        run.process.kill()
    return run


def whole(run: Any, directory: Path) -> dict[tuple[int, int], Trained]:
    """Returns what each record was when it was trained on; each was once, and none too late."""
    taken = trained(directory)
    assert all(len(times) == 1 for times in taken.values()), "trained on twice"
    assert len(taken) == STEPS * PROMPTS * SAMPLES
    assert {sample for _, sample in taken} == set(range(SAMPLES))
    ages = [step - record.version for ((step, record),) in taken.values()]
    assert max(ages) <= AGE
    rows = {row["step"]: row for row in run.metrics()}
    assert sorted(rows) == list(range(STEPS + 1))
    return {key: record for key, ((_, record),) in taken.items()}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="as it was", marks=pytest.mark.slow),
        pytest.param(
            ["controller.shards=1", "roles.rollout.slots=1"],
            id="one shard, one replica",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["controller.shards=3", "roles.rollout.slots=3", "cluster.devices=3"]
            + ["roles.policy.slots=2"],
            id="three shards, three replicas, two ranks",
        ),
    ],
)
def test_a_resumed_run_goes_on_with_samples_from_the_tokens_that_its_checkpoint_has(
    overrides: list[str], tmp_path: Path
) -> None:
    """Their first actions, log-probs and version are the same bits; what is behind is new."""
    run = killed(tmp_path, config(tmp_path))
    step, checkpoint = newest(run)
    begun = begun_in(checkpoint)
    assert begun, "nothing was in flight"
    done = resume(run, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run goes on from step" not in done.stdout
    records = whole(run, tmp_path)
    went_on = {key: records[key] for key in begun.keys() & records.keys()}
    assert went_on
    for key, record in went_on.items():
        has = begun[key]
        assert record.actions[: len(has.actions)] == has.actions
        assert record.logp[: len(has.logp)] == has.logp
        assert record.version == has.version
        assert len(record.actions) > len(has.actions)
    rows = {row["step"]: row for row in run.metrics()}
    assert rows[step + 1]["window/went_on"] == len(begun)
    assert not any(rows[later]["window/went_on"] for later in range(step + 2, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        pytest.param("controller.config.unfinished=redraw", id="redraw", marks=pytest.mark.slow),
        pytest.param("controller.config.age=3", id="other bounds", marks=pytest.mark.slow),
        pytest.param("roles.rollout.config.max_new_tokens=390", id="other generators"),
    ],
)
def test_unfinished_samples_that_cannot_go_on_are_drawn_again(
    override: str, tmp_path: Path
) -> None:
    """Also where a generator would not sample as the one that began them."""
    run = killed(tmp_path, config(tmp_path))
    step, checkpoint = newest(run)
    begun = begun_in(checkpoint)
    assert begun
    done = resume(run, override)
    assert done.returncode == 0, done.stdout + done.stderr
    records = whole(run, tmp_path)
    again = [records[key] for key in begun.keys() & records.keys()]
    assert again
    assert min(record.version for record in again) >= step
    assert not any(row.get("window/went_on") for row in run.metrics())
    is_told = "unfinished samples are drawn again" in done.stdout
    assert is_told == override.startswith("roles.rollout")


@pytest.mark.slow
def test_finished_samples_of_unfinished_groups_are_kept_and_scored_where_they_were_not(
    tmp_path: Path,
) -> None:
    """The checkpoint is made while rewards are awaited."""
    run = killed(tmp_path, config(tmp_path, rewards={"letters": {"use": "slow/tardy"}}))
    _, checkpoint = newest(run)
    headers = [header for header in headers_in(checkpoint) if header.status != GIVEN_BACK]
    assert any(header.rewards for header in headers)
    assert not all(header.rewards for header in headers)
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    records = whole(run, tmp_path)
    for header in headers:
        if header.key in records:
            assert records[header.key].version == header.versions[0]
            assert len(records[header.key].actions) == header.n_actions
    assert all(0 < row["reward/letters"] < 1 for row in run.metrics()[1:])


def test_a_checkpoint_without_unfinished_samples_goes_on_under_a_program_that_keeps_them(
    tmp_path: Path,
) -> None:
    job = config(tmp_path)
    job["controller"]["config"]["unfinished"] = "redraw"
    run = killed(tmp_path, job)
    _, checkpoint = newest(run)
    assert not (checkpoint / UNFINISHED).exists()
    done = resume(run, "controller.config.unfinished=keep")
    assert done.returncode == 0, done.stdout + done.stderr
    whole(run, tmp_path)


@pytest.mark.slow
def test_the_synchronous_program_goes_on_from_such_a_checkpoint(tmp_path: Path) -> None:
    """It draws what was unfinished again. Ages that equal the pace leave no gaps."""
    job = config(tmp_path)
    job["controller"]["config"] |= {"ahead": 1, "age": 1}
    run = killed(tmp_path, job)
    _, checkpoint = newest(run)
    assert begun_in(checkpoint)
    settings = f"{{prompts: {PROMPTS}}}"
    done = resume(run, "controller.use=core/sync", f"controller.config={settings}")
    assert done.returncode == 0, done.stdout + done.stderr
    whole(run, tmp_path)


def test_a_run_that_begins_again_by_itself_goes_on_with_unfinished_samples(tmp_path: Path) -> None:
    job = config(tmp_path)
    with runs.running(tmp_path, job) as run:
        run.read_until(f"step 3/{STEPS}")
        os.kill(run.pids()["controller.1"], signal.SIGKILL)
        assert run.wait() == 0, run.output
    whole(run, tmp_path)
    assert any(row.get("window/went_on") for row in run.metrics())


@pytest.mark.slow
def test_kills_of_all_kinds_of_processes_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    """A replica goes on within the run; after others the run goes on from a checkpoint, again and
    again with what samples had there.
    """
    job = config(tmp_path, checkpoint={"every": 1, "restarts": 9})
    with runs.running(tmp_path, job) as run:
        for step, victim in enumerate(("rollout.0", "controller.0", "policy.0", "rollout.1"), 1):
            run.read_until(f"step {step}/{STEPS}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pids()[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    whole(run, tmp_path)
    assert any(row.get("window/went_on") for row in run.metrics())


@pytest.mark.slow
def test_samples_of_a_model_go_on_after_a_restart(tmp_path: Path) -> None:
    """With the quickstart's: another replica reads the tokens, and log-probs are still right."""
    pytest.importorskip("gcore_torch")
    words = ["controller.use=async", "controller.config.midway=recompute"]
    words += ["controller.config.unfinished=keep", "controller.config.ahead=2"]
    words += ["controller.config.prompts=64", "run.steps=8", "checkpoint.every=1"]
    words += ["checkpoint.last=100"]
    runs.rows_of_recipe("quickstart", tmp_path, *words, timeout_s=600)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    with_begun = [path for path in checkpoints if (path / UNFINISHED).is_dir() and begun_in(path)]
    checkpoint = with_begun[0]
    for later in checkpoints[checkpoints.index(checkpoint) + 1 :]:
        shutil.rmtree(later)
    (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "before.jsonl")
    run = SimpleNamespace(path=tmp_path / "run", directory=tmp_path)
    done = resume(run, "roles.rollout.slots=2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["metrics"] for line in lines]
    assert sum(row.get("window/went_on", 0.0) for row in rows) == len(begun_in(checkpoint))
    assert max(row.get("logprob_gap_max", 0.0) for row in rows) < 1e-3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"controller": {"midway": "wait"}}, "unfinished: keep needs midway: recompute"),
        ({"run": {"deterministic": True}}, "but run.deterministic is true"),
        ({"roles": {"rollout": {"use": "slow/starts"}}}, "slow/starts has no capability continues"),
        ({"roles": {"rollout": {"use": "slow/ends"}}}, "slow/ends has no capability abort"),
        ({"sampling": {"use": "refine"}}, "draws records in waves or pieces"),
        ({"owned": {}}, "but controller.replicas is owned"),
    ],
    ids=["wait", "deterministic", "continues", "abort", "waves", "owned"],
)
def test_check_refuses_what_cannot_go_on(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    job = config(tmp_path)
    answer = runs.checked(tmp_path, job)
    assert answer.startswith("0 "), answer
    for name, part in changes.items():
        if name == "controller":
            job["controller"]["config"] |= part
        elif name == "owned":
            job["controller"]["replicas"] = "owned"
        else:
            job[name] = {**job.get(name, {}), **part}
    answer = runs.checked(tmp_path, job)
    assert not answer.startswith("0 ") and told in answer, answer
