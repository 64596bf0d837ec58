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
    assert "lease" not in (run.path / "logs" / "supervisor.log").read_text(), "an end is no loss"
    assert "its lease ends" not in (run.path / "logs" / "agent.0.log").read_text()


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


def forked(run: runs.Run, before: dict[str, int]) -> dict[str, int]:
    """Waits until every worker was started anew; returns worker -> its parent."""
    workers = before.keys() - {"agent.0"}
    while any(run.pids()[name] == before[name] for name in workers):
        time.sleep(0.02)
    return {name: psutil.Process(run.pids()[name]).ppid() for name in workers}


@pytest.mark.protects
def test_a_killed_supervisor_is_replaced_and_takes_over_its_agent_with_what_is_ready(
    still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        log = halted(run, tmp_path)
        servers = {int(pid) for pid in re.findall(r"spare\.\w+ \(pid (\d+)\) is ready", log)}
        store, before = run.store(), run.pids()
        watched = runs.Watched([before[name] for name in before.keys() - {"agent.0"}])
        os.kill(run.supervisor(), signal.SIGKILL)
        run.read_until("the supervisor ended with signal SIGKILL; it is started again")
        assert watched.all_end_within(20), "nobody supervises them"
        run.read_until("starting ")
        assert set(forked(run, before).values()) == servers
        assert run.pids()["agent.0"] == before["agent.0"]
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert not store.exists()
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))
    assert not (run.path / "logs" / "processes.json").exists()


def test_a_supervisor_that_is_killed_again_and_again_keeps_its_agent(
    still: list[float], tmp_path: Path
) -> None:
    """The second one has taken over an agent that is not its child."""
    (tmp_path / "halt rollout").touch()
    job = config("never")
    job["checkpoint"]["restarts"] = 2
    with runs.running(tmp_path, job) as run:
        wait_for(tmp_path / "at rollout")
        agent = run.pids()["agent.0"]
        for _ in range(2):
            before = run.pids()
            os.kill(run.supervisor(), signal.SIGKILL)
            run.read_until("the supervisor ended with signal SIGKILL; it is started again")
            forked(run, before)
        assert run.pids()["agent.0"] == agent
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))


def test_an_agent_that_was_taken_over_is_replaced_when_it_is_lost(
    still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config("never")) as run:
        wait_for(tmp_path / "at rollout")
        before = run.pids()
        os.kill(run.supervisor(), signal.SIGKILL)
        run.read_until("the supervisor ended with signal SIGKILL; it is started again")
        forked(run, before)
        watched = runs.Watched([before["agent.0"]])
        os.kill(before["agent.0"], signal.SIGKILL)
        run.read_until("the run goes on from step")
        assert watched.all_end_within(20)
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("agent", ["killed", "stopped"])
def test_a_killed_supervisor_whose_agent_is_no_use_starts_another_one(
    agent: str, still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config("never")) as run:
        wait_for(tmp_path / "at rollout")
        pids, store = run.pids(), run.store()
        watched = runs.Watched(list(pids.values()))
        os.kill(pids["agent.0"], signal.SIGSTOP)  # it takes no leave
        os.kill(run.supervisor(), signal.SIGKILL)
        if agent == "killed":
            os.kill(pids["agent.0"], signal.SIGKILL)
        run.read_until("the supervisor ended with signal SIGKILL; it is started again")
        assert watched.all_end_within(30)
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert not store.exists()
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))


@pytest.mark.protects
@pytest.mark.parametrize(
    "how",
    ["both at once", "their terminal is closed", "supervisor first", "the process before it first"],
)
def test_nothing_is_left_when_the_supervisor_and_the_process_before_it_are_killed(
    how: str, tmp_path: Path
) -> None:
    """Nobody tells the agent to end, and nobody is left who could wait for it."""
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        halted(run, tmp_path)
        guard, supervisor = run.process.pid, run.supervisor()
        pids = run.pids()
        servers = runs.children(pids["agent.0"])
        watched, store = runs.Watched([*pids.values(), *servers]), run.store()
        os.kill(pids["rollout.0"], signal.SIGSTOP)  # it reads no lifeline
        match how:
            case "both at once":
                os.killpg(guard, signal.SIGKILL)
            case "their terminal is closed":  # the kernel tells the group; the agent has its own
                os.killpg(guard, signal.SIGHUP)
            case "supervisor first":
                os.kill(guard, signal.SIGSTOP)  # so that it starts no other one
                os.kill(supervisor, signal.SIGKILL)
                wait_for(run.path / "logs" / "agent.0.log", "its lease ends in")
                os.kill(guard, signal.SIGKILL)
            case _:
                os.kill(guard, signal.SIGKILL)
        run.process.wait()
        assert watched.all_end_within(10), "before the end of the lease, which nobody can take"
        assert not store.exists()
        assert list(run.private.iterdir()) == []
        assert not (run.path / "logs" / "processes.json").exists()


def test_an_agent_whose_lease_nobody_takes_ends_and_the_run_goes_on_with_another(
    still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config(), "launcher.config.lease_s=0.5") as run:
        halted(run, tmp_path)
        pids = run.pids()
        watched = runs.Watched([*pids.values(), *runs.children(pids["agent.0"])])
        os.kill(run.process.pid, signal.SIGSTOP)  # so that it starts no other supervisor
        os.kill(run.supervisor(), signal.SIGKILL)
        assert watched.all_end_within(20)
        os.kill(run.process.pid, signal.SIGCONT)
        run.read_until("the supervisor ended with signal SIGKILL; it is started again")
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))
