"""One process at a time supervises a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from gcore_core.contract.errors import ConfigError
from gcore_core.run import start
from gcore_core.run.restart_supervisor import Start
from gcore_core.run.supervised import hold_run, run_goes_on

HOLDS = """
import sys
from pathlib import Path
from gcore_core.run.supervised import hold_run

with hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that supervises the run in ``tmp_path``."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_goes_on_while_a_process_supervises_it(tmp_path: Path) -> None:
    assert not run_goes_on(tmp_path)
    with hold_run(tmp_path):
        assert run_goes_on(tmp_path)
    assert not run_goes_on(tmp_path)


def resumed(run_dir: Path) -> Start:
    return Start(file=run_dir / "config.yaml", resume=run_dir)


def no_display(steps: int) -> NoReturn:
    raise AssertionError("it is refused before")


def test_a_run_that_another_process_supervises_is_not_touched(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before that one has started a process, by which it could be seen."""
    monkeypatch.setattr(start, "_ENDS_S", 0.0)
    with ExitStack() as end, pytest.raises(ConfigError, match="goes on already") as caught:
        start.prepare(
            Start(file=tmp_path / "config.yaml", resume=tmp_path), no_display, until_end=end
        )
    assert f"process {holder.pid} on {os.uname().nodename}" in str(caught.value)
    assert f"kill {holder.pid}" in str(caught.value)


def test_a_run_whose_supervisor_was_killed_is_free_at_once(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    holder.kill()
    holder.wait()
    with hold_run(tmp_path):
        assert run_goes_on(tmp_path)


def test_a_disk_without_locks_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", fails)
    with hold_run(tmp_path):
        assert not run_goes_on(tmp_path)


def test_a_run_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()  # for root, no mode forbids to write
    with pytest.raises(ConfigError, match="cannot be supervised from here"), hold_run(tmp_path):
        pass
