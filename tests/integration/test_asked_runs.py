"""A run that somebody asks saves its state, or ends; and nobody else is asked in its place."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_report.watch.asking import ask_to_save, ask_to_stop, is_alive

from gcore_core.contract.run_files import LOGS, SAVE
from gcore_core.run.checkpoints import Checkpoints
from tests.support import runs

STEPS = 400


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + runs.PATIENCE_S
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_saves_when_it_is_asked_and_ends_when_it_is_asked(tmp_path: Path) -> None:
    config = runs.job(run={"steps": STEPS}, checkpoint={"every": 0})
    with runs.running(tmp_path, config) as run:
        run.read_until(f"step   1/{STEPS}")
        assert is_alive(run.path) and Checkpoints(run.path).steps() == []
        assert ask_to_save(run.path)
        until(lambda: len(Checkpoints(run.path).steps()) == 1)
        assert not (run.path / SAVE).exists()
        assert ask_to_save(run.path)
        until(lambda: len(Checkpoints(run.path).steps()) == 2)
        assert ask_to_stop(run.path)
        assert run.process.wait(runs.PATIENCE_S) == 143
    assert len(Checkpoints(run.path).steps()) == 3
    assert not is_alive(run.path)
    assert not ask_to_save(run.path) and not ask_to_stop(run.path)
    assert not (run.path / SAVE).exists()


def test_a_process_that_has_the_supervisors_number_now_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / LOGS).mkdir()
    other = {"supervisor": {"pid": os.getpid(), "start_ticks": 1}, "boot": "", "agent": None}
    (tmp_path / LOGS / "processes.json").write_text(json.dumps(other))
    assert not is_alive(tmp_path)
    assert not ask_to_stop(tmp_path)


def test_a_directory_without_a_record_of_processes_has_no_run_that_goes_on(tmp_path: Path) -> None:
    assert not is_alive(tmp_path) and not ask_to_save(tmp_path) and not ask_to_stop(tmp_path)
