"""Runs in real processes: what they train on, what a kill leaves, what ``g-core check`` says."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_resume import resume, wait_for
from tests.support import runs

STEPS = 6


def config(ahead: int, age: int, midway: str = "wait", **changes: Any) -> dict[str, Any]:
    bounds = {"prompts": 6, "ahead": ahead, "age": age, "midway": midway}
    sections: dict[str, Any] = {
        "controller": {"use": "async", "shards": 2, "config": bounds},
        "objective": {"use": "algorithms/ppo_clip"},
        "run": {"steps": STEPS, "deterministic": midway == "wait"},
        "checkpoint": {"every": 1},
    }
    for name, part in changes.items():
        sections[name] = {**sections.get(name, {}), **part}
    return runs.job(**sections)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run two steps ahead, which nothing disturbs."""
    code, run = runs.finish(tmp_path_factory.mktemp("calm"), config(2, 2))
    assert code == 0, run.output
    return run


def last_batches(run: Any) -> dict[int, list[list[int]]]:
    """What each step trained on, by its lowest ordinal; of a step made twice, the latest."""
    return {min(ordinal for ordinal, _ in batch): batch for batch in run.batches()}


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Any:
    job = config(0, 0, controller={"use": "core/sync", "config": {"prompts": 6}})
    code, run = runs.finish(tmp_path_factory.mktemp("sync"), job)
    assert code == 0, run.output
    return run


@pytest.mark.parametrize(
    "shards",
    [1, pytest.param(2, marks=pytest.mark.rest), pytest.param(4, marks=pytest.mark.slow)],
)
def test_with_nothing_ahead_the_bits_are_those_of_the_synchronous_program(
    shards: int, synchronous: Any, tmp_path: Path
) -> None:
    code, run = runs.finish(tmp_path, config(0, 0, controller={"shards": shards}))
    assert code == 0, run.output
    assert run.weights() == synchronous.weights()
    assert run.batches() == synchronous.batches()
    digests = [[row["digests"] for row in one.metrics()] for one in (run, synchronous)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == STEPS + 1


def test_every_record_is_as_old_as_generation_runs_ahead(calm: Any) -> None:
    ages = [row["age/largest"] for row in calm.metrics()[1:]]
    assert ages == [0, 1, 2, 2, 2, 2]
    ordinals = [sorted({ordinal for ordinal, _ in batch}) for batch in calm.batches()]
    assert ordinals == [list(range(6 * step, 6 * step + 6)) for step in range(STEPS)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["controller.shards=1", "roles.rollout.slots=2"],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["controller.shards=4"], marks=pytest.mark.slow),
    ],
    ids=["one shard, two replicas", "as it was", "four shards"],
)
def test_a_run_killed_with_a_full_window_ends_as_if_it_had_not_been(
    overrides: list[str], calm: Any, tmp_path: Path
) -> None:
    """What was drawn ahead is in the checkpoint: the same records are trained on."""
    with runs.running(tmp_path, config(2, 2)) as run:
        run.read_until(f"step 3/{STEPS}")
        run.process.kill()
    done = resume(run, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.weights() == calm.weights()
    assert last_batches(run) == last_batches(calm)


def killed_in_an_update(directory: Path, replicas: int, every: int = 1) -> Any:
    """A run whose generator is killed while it draws and the trainer is in an update.

    Both halt there, and the trainer goes on when the generator is dead. So the process that takes
    its place comes too late for the weights of before.
    """
    roles = {
        "policy": {"use": "trouble/halts"},
        "rollout": {"use": "trouble/halting", "slots": replicas},
    }
    halts = [directory / "halt train", directory / "halt rollout"]
    for file in halts:
        file.touch()
    with runs.running(directory, config(2, 2, roles=roles, checkpoint={"every": every})) as run:
        wait_for(run, "at train")
        wait_for(run, "at rollout")
        os.kill(run.pids()["rollout.0"], signal.SIGKILL)
        for file in halts:
            file.unlink()
        run.read_until("rollout.0 ended with signal SIGKILL; it is started again")
        (directory / "go on").touch()
        run.wait()
    return run


@pytest.mark.slow
def test_a_deterministic_run_whose_generator_is_killed_in_an_update_ends_with_the_same_bits(
    calm: Any, tmp_path: Path
) -> None:
    run = killed_in_an_update(tmp_path, 1)
    assert run.process.returncode == 0, run.output
    hashes = [{row["step"]: row.get("weights_sha256") for row in r.metrics()} for r in (run, calm)]
    assert hashes[0][STEPS]
    assert hashes[0] == hashes[1]
    assert run.weights() == calm.weights()
    assert last_batches(run) == last_batches(calm)
    assert "rollout.0: its samples need the weights of version 2, and this generator" in run.output
    assert "the run goes on from step" in run.output


@pytest.mark.slow
def test_a_replica_that_holds_the_weights_draws_for_one_that_comes_too_late(
    calm: Any, tmp_path: Path
) -> None:
    run = killed_in_an_update(tmp_path, 2)
    assert run.process.returncode == 0, run.output
    assert run.weights() == calm.weights()
    assert run.batches() == calm.batches()
    assert "the run goes on from step" not in run.output


@pytest.mark.slow
def test_a_deterministic_run_without_a_checkpoint_ends_where_the_weights_are_gone(
    tmp_path: Path,
) -> None:
    run = killed_in_an_update(tmp_path, 1, every=0)
    assert run.process.returncode == 5, run.output
    assert "where it has none, set checkpoint.every" in run.output


VERSIONS = '''
"""A trainer that writes down which groups it was given at which version."""
import json

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_testing import fake


class Writes(fake.FakeTrainer):
    def prepare(self, records, scalars):
        with open("steps.jsonl", "a") as file:
            file.write(json.dumps([self.version, sorted({r.ordinal for r in records})]) + "\\n")
        return super().prepare(records, scalars)


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        name="writes", summary="-", factory="versions:Writes", config=fake.FakeTrainerConfig
    )
'''


@pytest.mark.slow
def test_thirty_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    """The window is full at each. A replica or a scorer goes on within the run; after another
    process the run goes on from its newest checkpoint.
    """
    chance = random.Random(5)
    killed = set()
    for number in range(10):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "versions.py").write_text(VERSIONS)
        job = config(
            1,
            4,
            "recompute",
            run={"steps": 8},
            checkpoint={"every": 1, "restarts": 9},
            roles={"policy": {"use": "versions/writes"}},
        )
        job["local"].append("versions.py")
        with runs.running(directory, job) as run:
            for step in (2, 4, 6):
                run.read_until(f"step {step}/8")
                pids = run.pids()
                victim = chance.choice(sorted(set(pids) - {"agent.0"}))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[victim], signal.SIGKILL)
                    killed.add(victim)
            assert run.wait() == 0, run.output
        rows = {row["step"]: row for row in run.metrics()}
        assert sorted(rows) == list(range(9))
        assert max(row.get("age/largest", 0) for row in rows.values()) <= 4
        lines = (directory / "steps.jsonl").read_text().splitlines()
        # A step that was made twice counts as it was made last.
        taken = dict(json.loads(line) for line in lines)
        trained = [ordinal for ordinals in taken.values() for ordinal in ordinals]
        assert sorted(trained) == list(range(6 * 8))
    assert len(killed) >= 4, killed


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"objective": {"use": "fake"}},
            "objective: fake does not correct for actions that older weights sampled",
        ),
        (
            {
                "roles": {"rollout": {"use": "trouble/halting"}},
                "controller": {"config": {"ahead": 1, "age": 4, "midway": "recompute"}},
                "run": {"deterministic": False},
            },
            "is not known to go on with samples through a push",
        ),
        (
            {"objective": {"config": {"old_logprobs": "recompute"}}},
            "set objective.config.correction.kind",
        ),
        (
            {"placement": {"sleep_in_training": "always"}},
            "async generates while it trains, so generators cannot sleep",
        ),
        ({"controller": {"config": {"ahead": 3, "age": 2}}}, "age must be at least ahead"),
        ({"controller": {"config": {"ahead": -1}}}, "ahead must be at least 0"),
        (
            {"placement": {"sleep_in_rollout": "always"}},
            "placement.sleep_in_rollout: always, but controller async generates while it trains",
        ),
        ({"controller": {"config": {"midway": "keep"}}}, "set it to recompute"),
    ],
    ids=["stale", "cut", "recompute", "sleep", "age", "ahead", "trainers", "keep"],
)
def test_check_refuses_what_the_program_cannot_run(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    answer = runs.checked(tmp_path, config(1, 4, **changes))
    assert not answer.startswith("0 ") and told in answer, answer


@pytest.mark.parametrize("old_logprobs", ["recompute", "interpolate"])
def test_check_accepts_log_probs_with_a_correction(old_logprobs: str, tmp_path: Path) -> None:
    corrected = {
        "old_logprobs": old_logprobs,
        "correction": {"kind": "truncate"},
        "stale_mask": {"older_than": 2},
    }
    answer = runs.checked(tmp_path, config(1, 4, objective={"config": corrected}))
    assert answer.startswith("0 "), answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "age", "midway"),
    [(1, 1, "wait"), (1, 4, "recompute")],
    ids=["one", "four"],
)
def test_the_quickstart_learns_with_generation_ahead(
    ahead: int, age: int, midway: str, tmp_path: Path
) -> None:
    """As many steps as core/sync takes; most held-out problems are solved in the end."""
    pytest.importorskip("gcore_torch")
    settings = {"ahead": ahead, "age": age, "midway": midway}
    words = [f"controller.config.{name}={value}" for name, value in settings.items()]
    rows = runs.rows_of_recipe(
        "quickstart", tmp_path, "controller.use=async", *words, timeout_s=1800
    )
    assert rows[0]["evaluation"]["greedy/exact"] < 0.45
    assert rows[-1]["evaluation"]["greedy/exact"] >= 0.9
    assert max(row["metrics"]["age/largest"] for row in rows[1:]) <= age
