"""A run that goes back to a checkpoint leaves each step once in its journals."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gcore_core.contract import run_files
from gcore_core.contract.run_files import Clock, Measured, Stage
from gcore_core.run import directory


def refuse(problem: str) -> None:
    raise AssertionError(problem)


def write(path: Path, *lines: object, torn: bytes = b"") -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + torn)


def stages(run_dir: Path) -> list[int]:
    return [line.step for line in run_files.read_trace(run_dir) if isinstance(line, Stage)]


def test_steps_that_are_made_again_stand_once_in_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / run_files.TRACE / "controller.0.jsonl"
    write(trace, Clock(0, 0.0), *(Stage(step, 0, "train", 1.0, 2.0) for step in range(4)))
    directory.go_back(tmp_path, 2, refuse)
    write(trace, *(Stage(step, 0, "train", 5.0, 6.0) for step in range(2, 4)))
    assert stages(tmp_path) == [0, 1, 2, 3]
    undone = (tmp_path / run_files.TRACE_UNDONE / trace.name).read_text().splitlines()
    assert len(undone) == 2


def test_steps_that_are_made_again_stand_once_in_the_record_of_placement(tmp_path: Path) -> None:
    path = tmp_path / run_files.PLACEMENT
    for seconds in (1.0, 9.0):
        write(path, *(Measured(step=step, measured_s=seconds) for step in range(3)))
        directory.go_back(tmp_path, 0, refuse)
    write(path, *(Measured(step=step, measured_s=4.0) for step in range(3)))
    assert len(path.read_text().splitlines()) == 3
    assert len((tmp_path / "placement.undone.jsonl").read_text().splitlines()) == 6


def test_half_a_line_of_a_killed_run_is_not_joined_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / run_files.PLACEMENT
    write(path, Measured(step=0, measured_s=1.0), torn=b'{"what": "meas')
    directory.go_back(tmp_path, 1, refuse)
    write(path, Measured(step=1, measured_s=2.0))
    _, outcomes = run_files.read_placement(tmp_path)
    assert sorted(outcomes) == [0, 1]


def test_an_empty_line_is_no_row(tmp_path: Path) -> None:
    """One may stand where a file was cut back behind half a row."""
    path = tmp_path / run_files.PLACEMENT
    write(path, Measured(step=0, measured_s=1.0))
    with path.open("ab") as file:
        file.write(b"\n")
    write(path, Measured(step=1, measured_s=2.0))
    _, outcomes = run_files.read_placement(tmp_path)
    assert sorted(outcomes) == [0, 1]


def test_journals_without_such_steps_stay_the_files_they_are(tmp_path: Path) -> None:
    path = tmp_path / run_files.PLACEMENT
    write(path, Measured(step=0, measured_s=1.0))
    before = path.stat().st_ino
    directory.go_back(tmp_path, 1, refuse)
    assert path.stat().st_ino == before
    assert not (tmp_path / "placement.undone.jsonl").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_journal_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / run_files.PLACEMENT
    write(path, Measured(step=5, measured_s=1.0))
    tmp_path.chmod(0o500)
    problems: list[str] = []
    directory.go_back(tmp_path, 1, problems.append)
    tmp_path.chmod(0o700)
    assert "cannot be shortened" in problems[0]
