"""Observers with settings of their own, in real processes: what they are told, and what a run does
about one that fails, ends or hangs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gcore_core.contract import run_files
from tests.support import runs

STEPS = 3
#: An observer that does what its settings say when it is told something.
TROUBLED = """
import os, time
from dataclasses import dataclass
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_testing import fake


@dataclass(frozen=True, kw_only=True)
class Config:
    does: str = ""
    at: str = ""


class Troubled(fake.FakeObserver):
    def __init__(self, config, context):
        super().__init__(None, context)
        self._config = config
        (self._directory / f"observing.{context.name}").write_text(str(os.getpid()))
        self._trouble("factory")

    def _write(self, what, **facts):
        super()._write(what, **facts)
        self._trouble(what)

    def _trouble(self, what):
        if what == self._config.at:
            {"raises": self._raise, "hangs": self._hang, "exits": lambda: os._exit(7)}[self._config.does]()

    def _raise(self):
        raise ValueError("no store")

    def _hang(self):
        time.sleep(1000)


@hookimpl
def gcore_observers():
    yield p.ObserverProvider(summary="-", factory="troubled:Troubled", config=Config)
"""  # noqa: E501


def job(**changes: Any) -> dict[str, Any]:
    """A short job with an evaluation, a checkpoint each step, and a well-behaved observer."""
    base = {
        "run": {"steps": STEPS},
        "controller": {"shards": 1},
        "checkpoint": {"every": 1},
        "evaluation": {"every": 2, "prompts": 4, "data": {"use": "fake"}},
    }
    return runs.job(**{**base, **changes}, observers={"plain": {"use": "fake"}})


def troubled(tmp_path: Path, *troubles: tuple[str, str], **changes: Any) -> dict[str, Any]:
    """The job with further observers: each does something when it is told something."""
    (tmp_path / "troubled.py").write_text(TROUBLED)
    changed = job(**changes)
    changed["local"] = [*changed["local"], "troubled.py"]
    for does, at in troubles:
        changed["observers"][f"{does}_{at}" if does else "second"] = {
            "use": "troubled",
            "timeout_s": 2.0 if does == "hangs" else 60.0,
            "config": {"does": does, "at": at},
        }
    return changed


def told(run: runs.Run, name: str = "plain") -> list[dict[str, Any]]:
    lines = (run.path / f"observed.{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_is_whole(run: runs.Run) -> None:
    """The run has all its steps, and the observer beside the bad one heard of each and of the
    end.
    """
    rows = run_files.read_metrics(run.path)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    heard = told(run)
    reported = [
        {"step": line["step"], "metrics": line["metrics"], "evaluation": line["evaluation"]}
        for line in heard
        if line["told"] == "step_end"
    ]
    assert reported == [
        {key: row[key] for key in ("step", "metrics", "evaluation")} for row in rows
    ]
    assert heard[-1] == {"told": "run_end", "error": ""}


def test_observers_that_fail_end_or_hang_are_told_once_and_the_run_is_whole(
    tmp_path: Path,
) -> None:
    """And the one beside them is told what the metrics file holds, and of every checkpoint."""
    troubles = [("raises", "factory"), ("exits", "step_end"), ("hangs", "step_end")]
    code, run = runs.finish(tmp_path, troubled(tmp_path, *troubles))
    assert code == 0, run.output
    check_is_whole(run)
    heard = told(run)
    assert heard[0] == {"told": "run_start", "name": "fake", "resumed_from": 0}
    saved = [line for line in heard if line["told"] == "checkpoint_saved"]
    assert [line["step"] for line in saved] == list(range(1, STEPS + 1))
    assert Path(saved[-1]["path"]).is_dir()
    assert run.output.count("\nobservers.") == len(troubles), run.output
    assert "observers.raises_factory: ValueError: no store" in run.output
    assert "in factory, at" in run.output and "troubled.py" in run.output
    assert "observers.exits_step_end: its process has ended with exit code 7" in run.output
    # The run may end within these 2 s: then that is told in place of the report.
    hung = r"observers\.hangs_step_end: it has not (taken a report for|ended within) 2 s"
    assert re.search(hung, run.output), run.output
    log = (run.path / "logs" / "observer.raises_factory.log").read_text()
    assert "Traceback" in log and "no store" in log
    pid = run.path / "observing.hangs_step_end"
    if pid.exists():  # on a busy machine it may have been ended before it wrote that
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


@pytest.mark.slow
@pytest.mark.parametrize("does", ["raises", "exits", "hangs"])
def test_an_observer_that_fails_at_the_end_is_told_and_the_run_ended_well(
    does: str, tmp_path: Path
) -> None:
    code, run = runs.finish(tmp_path, troubled(tmp_path, (does, "run_end")))
    assert code == 0, run.output
    check_is_whole(run)
    assert run.output.count("\nobservers.") == 1, run.output


@pytest.mark.slow
def test_an_observer_outlives_a_restart_and_hears_from_where_a_run_goes_on(tmp_path: Path) -> None:
    """Within the process of a run, and in the one that resumes it after the supervisor was
    killed; the orphaned observer ends by itself.
    """
    steps = 30
    changed = troubled(
        tmp_path, ("", ""), run={"steps": steps}, checkpoint={"every": 1, "restarts": 1}
    )
    with runs.running(tmp_path, changed) as run:
        run.read_until(f" 3/{steps} ")
        os.kill(run.pids()["policy.0"], signal.SIGKILL)
        run.read_until("the run goes on from step")
        run.read_until(f"/{steps} ")
        supervisor = run.supervisor()
        run.process.kill()
        os.kill(supervisor, signal.SIGKILL)
        pid = int((run.path / "observing.second").read_text())
        deadline_s = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists(), "the observer has stayed without a supervisor"
    heard = told(run, "second")
    starts = [line["resumed_from"] for line in heard if line["told"] == "run_start"]
    assert starts[0] == 0 and len(starts) == 2 and starts[1] > 0
    assert heard[-1] == {"told": "run_end", "error": "the supervisor was lost"}
    command = f"-m gcore_core resume {run.path} launcher.config.socket_dir=/tmp"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=run.directory,
        capture_output=True,
        text=True,
        timeout=runs.PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    again = told(run, "second")[len(heard) :]
    assert again[0]["told"] == "run_start" and again[0]["resumed_from"] > 0
    assert [line["step"] for line in again if line["told"] == "step_end"] == list(
        range(again[0]["resumed_from"] + 1, steps + 1)
    )
    assert again[-1] == {"told": "run_end", "error": ""}
