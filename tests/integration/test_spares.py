"""Processes are kept ready, and take the place of lost workers."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import runs

STEPS = 5


def config(spares: str = "always") -> dict[str, Any]:
    """A job whose generator waits in its third step for the file ``go on``."""
    found: dict[str, Any] = runs.job(
        run={"steps": STEPS, "deterministic": True, "spares": spares},
        checkpoint={"every": 1, "restarts": 1},
    )
    found["roles"] = {
        "policy": {"use": "trouble/recording"},
        "rollout": {"use": "trouble/halting", "slots": 2},
    }
    return found


def wait_for(path: Path, text: str = "") -> str:
    """The content of a file, as soon as it is there and holds ``text``."""
    deadline_s = time.monotonic() + runs.PATIENCE_S
    while time.monotonic() < deadline_s:
        if path.exists() and text in (content := path.read_text()):
            return content
        time.sleep(0.02)
    raise AssertionError(f"{path} without {text!r}")


def started(run: runs.Run, name: str) -> int:
    """The pid of the latest start of a worker."""
    log = (run.path / "logs" / "agent.0.log").read_text()
    return int(re.findall(rf"INFO {re.escape(name)} is started, pid (\d+)", log)[-1])


def halted(run: runs.Run, directory: Path) -> str:
    """Waits until the run stands still and every spare is ready; returns the agent's log."""
    wait_for(directory / "at rollout")
    log = run.path / "logs" / "agent.0.log"
    for kind in ("policy", "rollout", "scorer"):
        wait_for(log, f" spare.{kind} (pid ")
    return wait_for(log, " spare.controller (pid ")


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights of the undisturbed run."""
    code, run = runs.finish(tmp_path_factory.mktemp("calm"), config("never"))
    assert code == 0, run.output
    assert "spare" not in (run.path / "logs" / "agent.0.log").read_text()
    return run.weights()


@pytest.mark.parametrize("victim", ["rollout.0", "scorer.0"])
def test_a_lost_worker_is_replaced_by_one_that_is_forked_and_leads_a_group_of_its_own(
    victim: str, still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        log = halted(run, tmp_path)
        kind = victim.partition(".")[0]
        found = re.search(rf"spare\.{kind} \(pid (\d+)\) is ready; it forks", log)
        assert found is not None, log
        lost = started(run, victim)
        os.kill(lost, signal.SIGKILL)
        run.read_until("it is started again")
        wait_for(run.path / "logs" / "agent.0.log", f"{victim} (pid {lost}) ended")
        while (pid := started(run, victim)) == lost:
            time.sleep(0.02)
        worker = psutil.Process(pid)
        assert worker.ppid() == int(found[1])
        assert os.getpgid(pid) == pid
        os.kill(pid, signal.SIGKILL)  # the second time too, and its exit is told
        run.read_until(f"{victim} ended with signal SIGKILL; it is started again")
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
    assert run.weights() == still


def test_nothing_is_left_when_an_agent_is_killed_beside_stopped_workers_that_were_forked(
    tmp_path: Path,
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        halted(run, tmp_path)
        lost = started(run, "rollout.0")
        os.kill(lost, signal.SIGKILL)
        run.read_until("it is started again")
        while (pid := started(run, "rollout.0")) == lost:
            time.sleep(0.02)
        watched = runs.Watched(runs.descendants(run.process.pid))
        os.kill(pid, signal.SIGSTOP)
        (agent,) = runs.children(run.process.pid)
        os.kill(agent, signal.SIGKILL)
        assert watched.all_end_within(20)
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output


def test_a_worker_lives_on_when_the_server_that_forked_it_is_killed(
    still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        halted(run, tmp_path)
        lost = started(run, "rollout.0")
        os.kill(lost, signal.SIGKILL)
        run.read_until("it is started again")
        while (pid := started(run, "rollout.0")) == lost:
            time.sleep(0.02)
        server = psutil.Process(pid).ppid()
        os.kill(server, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)  # its end is noticed, without a server that could tell it
        run.read_until("rollout.0 ended with signal SIGKILL; it is started again")
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
    assert run.weights() == still
