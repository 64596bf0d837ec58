"""``g-core demo`` with fakes in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import runs

STEPS = 60


@contextmanager
def demo(directory: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", "-m", "gcore_core", "demo", "--recipe", "job.yaml", *words]
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(runs.REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lay(directory: Path, **changes: dict[str, object]) -> Path:
    (directory / "trouble.py").write_text(runs.TROUBLE)
    config = runs.job(roles={"policy": {"use": "fake"}}, **changes)
    (directory / "job.yaml").write_text(json.dumps(config))
    return directory


@pytest.mark.protects
def test_a_run_that_is_killed_twice_has_the_weights_of_one_that_is_not_and_again(
    tmp_path: Path,
) -> None:
    lay(tmp_path)
    for number in ("001", "002"):
        with demo(tmp_path, "--steps", str(STEPS)) as process:
            printed, _ = process.communicate(timeout=runs.PATIENCE_S * 2)
        assert process.returncode == 0, printed
        *_, first, second, verdict = printed.splitlines()
        assert verdict == "same" and printed.count("SIGKILL to ") == 2
        assert first.startswith("undisturbed   ") and second.startswith("killed twice  ")
        assert first.split()[-1] == second.split()[-1]
        assert (tmp_path / "runs" / "demo" / number / "killed" / "summary.md").exists()


def test_runs_that_do_not_repeat_are_told_apart(tmp_path: Path) -> None:
    """A reward that throws dice."""
    (tmp_path / "dice.py").write_text(
        "import random\n\ndef score(record):\n    return random.SystemRandom().random()\n"
    )
    reward = {"use": "core/function", "config": {"path": "dice.py", "name": "score"}}
    lay(tmp_path, rewards={"letters": reward})
    with demo(tmp_path, "--steps", "4", "--kills", "0") as process:
        printed, _ = process.communicate(timeout=runs.PATIENCE_S)
    assert process.returncode == 1, printed
    assert "differs; where they part: g-core diff " in printed


def test_a_run_that_fails_is_told_and_the_other_one_ended(tmp_path: Path) -> None:
    lay(tmp_path, rewards={"letters": {"use": "trouble/raises"}})
    with demo(tmp_path, "--steps", str(STEPS)) as process:
        printed, _ = process.communicate(timeout=runs.PATIENCE_S)
    assert process.returncode == 5, printed
    assert "no such device" in printed and "what it printed: " in printed


@pytest.mark.protects
def test_ctrl_c_ends_both_runs_and_every_process(tmp_path: Path) -> None:
    lay(tmp_path)
    with demo(tmp_path, "--steps", "100000", "--kills", "0") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("steps: "):
                break
        watched = runs.Watched(runs.descendants(process.pid))
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=runs.PATIENCE_S)
        assert process.returncode == 130, printed
        assert printed.endswith("stopped; every process has ended\n")
        assert watched.all_end_within(10)
        watched.close()
