"""A run that was killed goes on: the same prompts, the same weights, on other numbers of processes too."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("local_runs", Path(__file__).with_name("local_runs.py"))
assert _spec is not None and _spec.loader is not None
runs = importlib.util.module_from_spec(_spec)
sys.modules["local_runs"] = runs
_spec.loader.exec_module(runs)

STEPS = 6


def config(**changes: Any) -> dict[str, Any]:
    return runs.job(run={"steps": STEPS, "deterministic": True}, checkpoint={"every": 1}, **changes)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    code, run = runs.finish(tmp_path_factory.mktemp("calm"), config())
    assert code == 0, run.output
    return run


def resume(run: Any, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gcore_core", "resume", str(run.path), "launcher.config.socket_dir=/tmp", *overrides],
        cwd=run.directory,
        env={**os.environ, "PYTHONPATH": f"{runs.REPOSITORY}:{run.directory}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=runs.PATIENCE_S,
    )


def killed_at(directory: Path, step: int) -> Any:
    """A run whose supervisor is killed once it has told of the step."""
    with runs.running(directory, config()) as run:
        run.read_until(f"step {step}/{STEPS}")
        run.process.kill()
    return run


def last_batches(run: Any) -> dict[int, list[list[int]]]:
    """What each step trained on, by its lowest ordinal; of a step that was made twice, the latest."""
    return {min(ordinal for ordinal, _ in batch): batch for batch in run.batches()}


@pytest.mark.parametrize(
    "overrides",
    [[], ["controller.shards=1"], ["controller.shards=4", "roles.rollout.slots=2"]],
    ids=["as it was", "one shard", "four shards, two replicas"],
)
def test_a_resumed_run_ends_as_if_it_had_not_been_killed(overrides: list[str], calm: Any, tmp_path: Path) -> None:
    run = killed_at(tmp_path, 3)
    done = resume(run, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.weights() == calm.weights()
    assert last_batches(run) == last_batches(calm), "every prompt is consumed once"
    position = json.loads((run.path / "position.json").read_text())
    assert position["next_ordinal"] == STEPS * 6


@pytest.mark.parametrize("victim", ["policy.0", "controller.1", "controller.0"])
def test_a_lost_trainer_or_controller_makes_the_run_go_on_from_its_newest_checkpoint(
    victim: str, calm: Any, tmp_path: Path
) -> None:
    with runs.running(tmp_path, config()) as run:
        run.read_until(f"step 3/{STEPS}")
        os.kill(run.pids()[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert "the run goes on from step" in run.output
    assert run.weights() == calm.weights()
    assert last_batches(run) == last_batches(calm)


def test_a_run_is_not_resumed_as_another_one(tmp_path: Path) -> None:
    run = killed_at(tmp_path, 2)
    done = resume(run, "run.seed=4")
    assert done.returncode == 2
    assert "run.seed: 3 was saved, 4 is asked for" in done.stderr


def test_what_cannot_be_resumed_is_said(tmp_path: Path) -> None:
    code, run = runs.finish(tmp_path, runs.job(run={"steps": 1}))
    assert code == 0
    done = resume(run)
    assert done.returncode == 8
    assert "there is no checkpoint that is whole" in done.stderr
    (run.path / "config.yaml").unlink()
    assert "there is no run" in resume(run).stderr


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(calm: Any, tmp_path: Path) -> None:
    run = killed_at(tmp_path, 4)
    newest = sorted(path for path in (run.path / "checkpoints").glob("step-*") if path.name[-1].isdigit())[-1]
    with next(newest.glob("policy/*")).open("r+b") as file:
        file.write(b"\xff" * 8)
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{newest.name} is refused" in done.stdout
    assert run.weights() == calm.weights()
