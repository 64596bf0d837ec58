"""A run whose final weights find no place waits with them until they do, or until it is stopped."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gcore_testing import fake

from gcore_core.run.saved_weights import weights_sha256

WAITS_S = 120
JOB = {
    "run": {"steps": 1},
    "launcher": {"use": "core/local"},
    "controller": {"shards": 2, "config": {"prompts": 4}},
    "data": {"use": "fake"},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "fake", "slots": 2}, "rollout": {"use": "fake"}},
    "rewards": {"sum": {"use": "fake"}},
    "local": [fake.__file__],
}
#: A plugin that fills the disk of the run when its last step has ended.
FILLS = """
import os
from gcore_core import hookimpl

@hookimpl
def gcore_step_end(run, report):
    if report.step < run.steps:
        return
    with open(os.path.join(run.directory, "filled"), "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a run in ``tmp_path/run``; ends those that a test leaves."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))

    def begin(*before: str, overrides: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "gcore_core", "run", "job.yaml", "run.dir=run", *overrides]
        command = ["bash", "-c", " && ".join([*before, f"exec {shlex.join(words)}"])]
        if before:
            command = ["unshare", "--mount", *command]
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def until_it_waits(process: subprocess.Popen[str]) -> str:
    """Returns what a run has printed when it says that it waits."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "keeps the trained weights in memory" in line:
            return "".join(lines)
    raise AssertionError("it did not wait:\n" + "".join(lines))


def rest_of(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=WAITS_S)[0]


def test_a_place_that_cannot_be_written_is_waited_for(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    obstacle = tmp_path / "run" / ".weights.partial"
    obstacle.write_text("a file where a directory should be")
    process = start()
    said = until_it_waits(process)
    assert f"policy.0, {tmp_path}/run/weights: the final weights could not be written" in said
    assert "no checkpoint is there" in said
    obstacle.unlink()
    rest = rest_of(process)
    assert process.returncode == 0, rest
    assert f"weights_sha256 {weights_sha256(tmp_path / 'run' / 'weights')}" in rest
    assert not list((tmp_path / "run").glob(".*partial"))


def test_a_run_that_waits_saves_a_checkpoint_when_it_is_stopped(
    start: Start, tmp_path: Path
) -> None:
    """What cannot be written as weights may have room as a state; the run can go on from it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".weights.partial").write_text("")
    process = start()
    until_it_waits(process)
    process.send_signal(signal.SIGTERM)
    rest = rest_of(process)
    assert process.returncode == 143, rest
    assert "go on from step 1 with: g-core resume" in rest
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


@pytest.mark.protects
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_is_waited_for_and_loses_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "fill.py").write_text(FILLS)
    mount = f"mount -t tmpfs -o size=4m tmpfs {shlex.quote(str(tmp_path / 'run'))}"
    process = start(mount, overrides=(f"local=[{fake.__file__},fill.py]",))
    said = until_it_waits(process)
    assert "No space left on device" in said and "free some space" in said
    inside = Path("/proc", str(process.pid), "cwd", "run")
    assert not (inside / "weights").exists() and not (inside / ".weights.partial").exists()
    (inside / "filled").unlink()
    rest = rest_of(process)
    assert process.returncode == 0 and "weights_sha256 " in rest, rest
