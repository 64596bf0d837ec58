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


def steps(run: runs.Run) -> list[int]:
    """The steps of which there are metrics, but for the row before the first."""
    return [int(row["step"]) for row in run.metrics() if row["step"]]


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


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_ends_with_processes_that_were_kept_ready(
    number: int, tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        log = halted(run, tmp_path)
        servers = {int(pid) for pid in re.findall(r"spare\.\w+ \(pid (\d+)\) is ready", log)}
        found = runs.descendants(run.process.pid)
        assert servers <= set(found)
        watched, store = runs.Watched(found), run.store()
        if number:
            os.kill(run.process.pid, number)
        (tmp_path / "go on").touch()
        assert run.wait() == (143 if number else 0), run.output
        assert watched.all_end_within(0), "a process survives"
        assert not store.exists()
        assert list(run.private.iterdir()) == []
    assert not (run.path / "logs" / "processes.json").exists()


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
        watched = runs.Watched(runs.descendants(run.supervisor()))
        os.kill(pid, signal.SIGSTOP)
        os.kill(run.pids()["agent.0"], signal.SIGKILL)
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


@pytest.mark.parametrize("victim", ["policy.0", "controller.0", "controller.1"])
def test_a_run_that_goes_back_keeps_its_agent_and_forks_every_worker(
    victim: str, still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        log = halted(run, tmp_path)
        servers = {int(pid) for pid in re.findall(r"spare\.\w+ \(pid (\d+)\) is ready", log)}
        agent, before = run.pids()["agent.0"], run.pids()
        workers = set(before) - {"agent.0"}
        watched = runs.Watched([before[name] for name in workers])
        os.kill(before[victim], signal.SIGKILL)
        run.read_until("the run goes on from step")
        assert watched.all_end_within(20)
        run.read_until("starting ")
        while any(run.pids()[name] == before[name] for name in workers):
            time.sleep(0.02)
        assert run.pids()["agent.0"] == agent
        (tmp_path / "go on").touch()
        parents = {psutil.Process(run.pids()[name]).ppid() for name in workers}
        assert parents == servers
        assert run.wait() == 0, run.output
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("lost", ["alone", "with its agent"])
def test_a_killed_supervisor_is_started_again_and_the_run_goes_on(
    lost: str, still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config("never")) as run:
        wait_for(tmp_path / "at rollout")
        watched = runs.Watched(list(run.pids().values()))
        store, agent = run.store(), run.pids()["agent.0"]
        if lost == "with its agent":  # which takes no leave
            os.kill(agent, signal.SIGSTOP)
        os.kill(run.supervisor(), signal.SIGKILL)
        if lost == "with its agent":
            os.kill(agent, signal.SIGKILL)
        run.read_until("the supervisor ended with signal SIGKILL; it is started again")
        assert watched.all_end_within(20)
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert not store.exists()
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))
