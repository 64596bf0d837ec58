"""Runs in real processes in which a judge and a generator change devices at every push."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gcore_core.contract import run_files
from tests.integration.test_sleeping import asleep_at, finished, judged, rows
from tests.support import runs

pytestmark = pytest.mark.rest

STEPS = 5
PROMPTS = 4
#: The border has one or two devices before it.
SERVING = ["rollout.0", "rollout.1", "judge.1", "judge.2"]


def moving(directory: Path, shards: int = 1, use: str = "witness/turning") -> dict[str, Any]:
    """A job whose border between the two roles moves at every step, on three devices."""
    told = judged(directory, use=use)
    bounds = {"prompts": PROMPTS, "ahead": 1, "age": 1}
    return {
        **told,
        "controller": {"use": "async", "shards": shards, "config": bounds},
        "objective": {"use": "algorithms/ppo_clip"},
        "run": {**told.get("run", {}), "steps": STEPS, "deterministic": True},
        "checkpoint": {"every": 1, "restarts": 9},
    }


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same job where nothing moves."""
    directory = tmp_path_factory.mktemp("still") / "run"
    return finished(directory, moving(directory, use="core/even"))


def check_awake(run: Any) -> None:
    """Every replica that is ever awake has worked, and none while it slept."""
    for worker in SERVING:
        told = rows(run, worker)
        steps = [at_ns for at_ns, _, what, _ in told if what == "step"]
        assert steps, f"{worker} did nothing"
        assert not any(asleep_at(told, at_ns) for at_ns in steps), f"{worker} worked asleep"


@pytest.mark.parametrize("shards", [1, 2])
def test_roles_change_devices_at_pushes_and_every_record_is_trained_on_once(
    shards: int, still: Any, tmp_path: Path
) -> None:
    run = finished(tmp_path / "run", moving(tmp_path / "run", shards))
    assert run.batches() == still.batches() and run.weights() == still.weights()
    keys = [tuple(key) for batch in run.batches() for key in batch]
    assert len(keys) == len(set(keys)) and len({ordinal for ordinal, _ in keys}) == STEPS * PROMPTS
    check_awake(run)
    decisions, outcomes = run_files.read_placement(run.path)
    assert sorted(decisions) == list(range(STEPS + 1))
    # The groups of the last step are begun one step before it, so its rollout has none.
    assert sorted(outcomes) == list(range(STEPS - 1))
    for outcome in outcomes.values():
        assert outcome.measured_s > 0 and outcome.work > 0
        assert outcome.training_s >= 0 and outcome.pushing_s >= 0
    told = [row for row in run.metrics() if "placement/moved" in row]
    assert [row["age/largest"] for row in run.metrics()[1:]] == [0, 1, 1, 1, 1]
    assert len(told) >= STEPS - 1 and max(row["placement/moved"] for row in told) > 0


def test_replay_is_shown_what_was_drawn_between_two_pushes(still: Any, tmp_path: Path) -> None:
    pytest.importorskip("gcore_placement")
    run = finished(tmp_path / "run", moving(tmp_path / "run", use="placement/replay"))
    assert run.weights() == still.weights()
    decisions, outcomes = run_files.read_placement(run.path)
    # Two steps' groups are begun under the first weights, one step's under those after it.
    drawn = [decisions[step].seen["policy_requests"] for step in range(1, STEPS)]
    group = len(run.batches()[0]) // PROMPTS
    assert drawn == [2 * PROMPTS * group, *[PROMPTS * group] * (STEPS - 2)]
    assert {decisions[step].mode for step in decisions} == {"split"}
    assert all(outcome.work > 0 for outcome in outcomes.values())


def test_a_killed_judge_and_a_killed_shard_lose_nothing(still: Any, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with runs.running(directory, moving(directory, 2)) as run:
        for step, victim in ((1, "judge.2"), (2, "judge.1"), (3, "controller.1")):
            run.read_until(f"step {step}/{STEPS}")
            os.kill(run.pids()[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert run.weights() == still.weights()
    taken = {min(ordinal for ordinal, _ in batch): batch for batch in run.batches()}
    expected = {min(ordinal for ordinal, _ in batch): batch for batch in still.batches()}
    assert taken == expected
    check_awake(run)


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("placement/colocated", "generation does not end"),
        ("witness/inturns", "placement policy witness/inturns: has generators take turns"),
    ],
)
def test_check_refuses_what_cannot_move(use: str, told: str, tmp_path: Path) -> None:
    pytest.importorskip("gcore_placement")
    job = moving(tmp_path, use=use)
    job["run"]["deterministic"] = False
    answer = runs.checked(tmp_path, job)
    assert not answer.startswith("0 ") and told in answer, answer


@pytest.mark.parametrize("use", ["placement/split", "placement/replay", "placement/utilisation"])
@pytest.mark.parametrize("midway", ["wait", "recompute"])
def test_check_accepts_policies_that_move_at_pushes(use: str, midway: str, tmp_path: Path) -> None:
    pytest.importorskip("gcore_placement")
    job = moving(tmp_path, use=use)
    job["controller"]["config"]["midway"] = midway
    answer = runs.checked(tmp_path, job)
    assert answer.startswith("0 "), answer
