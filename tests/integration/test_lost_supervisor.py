"""A supervisor that is lost is replaced, and nothing is left of one that is not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

STEPS = 5


def config() -> dict[str, Any]:
    """A job whose generator waits in its third step for the file ``go on``."""
    found: dict[str, Any] = runs.job(
        run={"steps": STEPS, "deterministic": True},
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


def steps(run: runs.Run) -> list[int]:
    """The steps of which there are metrics, but for the row before the first."""
    return [int(row["step"]) for row in run.metrics() if row["step"]]


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights of the undisturbed run."""
    code, run = runs.finish(tmp_path_factory.mktemp("calm"), config())
    assert code == 0, run.output
    return run.weights()


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_ends(number: int, tmp_path: Path) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        wait_for(tmp_path / "at rollout")
        watched, store = runs.Watched(runs.descendants(run.process.pid)), run.store()
        if number:
            os.kill(run.process.pid, number)
        (tmp_path / "go on").touch()
        assert run.wait() == (143 if number else 0), run.output
        assert watched.all_end_within(0), "a process survives"
        assert not store.exists()
        assert list(run.private.iterdir()) == []
    assert not (run.path / "logs" / "processes.json").exists()


@pytest.mark.parametrize("victim", ["policy.0", "controller.0", "controller.1"])
def test_a_run_that_goes_back_starts_another_agent_and_every_worker_again(
    victim: str, still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        wait_for(tmp_path / "at rollout")
        store, before = run.store(), run.pids()
        watched = runs.Watched(list(before.values()))
        os.kill(before[victim], signal.SIGKILL)
        run.read_until("the run goes on from step")
        assert watched.all_end_within(0), "the site is closed by then"
        assert not store.exists()
        run.read_until("starting ")
        wait_until_started_again(run, before)
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))


def test_losses_of_a_trainer_and_of_the_supervisor_are_counted_together(tmp_path: Path) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:  # one restart
        wait_for(tmp_path / "at rollout")
        before = run.pids()
        os.kill(before["policy.0"], signal.SIGKILL)
        run.read_until("the run goes on from step")
        run.read_until("starting ")
        wait_until_started_again(run, before)
        os.kill(run.supervisor(), signal.SIGKILL)
        assert run.wait() == 5, run.output
    assert "checkpoint.restarts are used up" in run.output


def wait_until_started_again(run: runs.Run, before: dict[str, int]) -> None:
    """Waits until the agent and every worker were started again."""
    now = before
    while any(now[name] == pid for name, pid in before.items()):
        time.sleep(0.02)
        with contextlib.suppress(FileNotFoundError):  # between two agents there is no record
            now = run.pids()


@pytest.mark.protects
def test_a_killed_supervisor_is_replaced_and_starts_another_agent(
    still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        wait_for(tmp_path / "at rollout")
        store, before = run.store(), run.pids()
        watched = runs.Watched(list(before.values()))
        os.kill(run.supervisor(), signal.SIGKILL)
        run.read_until("the supervisor ended with signal SIGKILL; it is started again")
        assert watched.all_end_within(20), "nobody supervises them"
        run.read_until("starting ")
        wait_until_started_again(run, before)
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert not store.exists()
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))
    assert not (run.path / "logs" / "processes.json").exists()


def test_a_supervisor_that_is_killed_again_and_again_is_replaced_each_time(
    still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    job = config()
    job["checkpoint"]["restarts"] = 2
    with runs.running(tmp_path, job) as run:
        wait_for(tmp_path / "at rollout")
        for _ in range(2):
            before = run.pids()
            os.kill(run.supervisor(), signal.SIGKILL)
            run.read_until("the supervisor ended with signal SIGKILL; it is started again")
            wait_until_started_again(run, before)
        (tmp_path / "go on").touch()
        assert run.wait() == 0, run.output
        assert list(run.private.iterdir()) == []
    assert run.weights() == still
    assert steps(run) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("agent", ["killed", "stopped"])
def test_a_killed_supervisor_whose_agent_is_killed_or_stopped_too_is_replaced(
    agent: str, still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        wait_for(tmp_path / "at rollout")
        pids, store = run.pids(), run.store()
        watched = runs.Watched(list(pids.values()))
        os.kill(pids["agent.0"], signal.SIGSTOP)  # it ends nothing by itself
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
        wait_for(tmp_path / "at rollout")
        starter, supervisor = run.process.pid, run.supervisor()
        pids = run.pids()
        watched, store = runs.Watched(list(pids.values())), run.store()
        os.kill(pids["rollout.0"], signal.SIGSTOP)  # it reads no lifeline
        match how:
            case "both at once":
                os.killpg(starter, signal.SIGKILL)
            case "their terminal is closed":  # the kernel tells the group; the agent has its own
                os.killpg(starter, signal.SIGHUP)
            case "supervisor first":
                os.kill(starter, signal.SIGSTOP)  # so that it starts no other one
                os.kill(supervisor, signal.SIGKILL)
                assert watched.all_end_within(10), "nobody supervises them"
                os.kill(starter, signal.SIGKILL)
            case _:
                os.kill(starter, signal.SIGKILL)
        run.process.wait()
        assert watched.all_end_within(10)
        assert not store.exists()
        assert list(run.private.iterdir()) == []
        assert not (run.path / "logs" / "processes.json").exists()


def test_an_agent_ends_with_its_supervisor_before_there_is_another(
    still: list[float], tmp_path: Path
) -> None:
    (tmp_path / "halt rollout").touch()
    with runs.running(tmp_path, config()) as run:
        wait_for(tmp_path / "at rollout")
        pids = run.pids()
        watched = runs.Watched(list(pids.values()))
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
