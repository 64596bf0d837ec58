"""Runs of fakes in real processes: the same result for any number of shards, nothing left behind,
clear ends.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import runs

ENDLESS = {"run": {"steps": 1_000_000}}


def free_ports(count: int) -> int:
    """The first of a row of loopback ports that are free now."""
    for first in range(20_000, 30_000, count):
        taken = []
        try:
            for port in range(first, first + count):
                taken.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for probe in taken:
                probe.close()
    raise AssertionError("no ports are free")


# -- results ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    code, run = runs.finish(tmp_path_factory.mktemp("alone"), runs.job(controller={"shards": 1}))
    assert code == 0, run.output
    return run


def with_port() -> dict[str, Any]:
    return {"launcher": {"config": {"port": free_ports(8)}}}


@pytest.mark.protects
@pytest.mark.parametrize(
    "changes",
    [
        lambda: {"controller": {"shards": 2}},
        lambda: {"controller": {"shards": 4}, "roles": {"rollout": {"use": "fake", "slots": 2}}},
        lambda: {"controller": {"shards": 2}, "launcher": {"use": "core/inline"}},
        with_port,
    ],
    ids=["two-shards", "four-shards-two-replicas", "inline", "ports"],
)
def test_every_launcher_and_layout_trains_the_same_records_to_the_same_weights(
    changes: Callable[[], dict[str, Any]], alone: Any, tmp_path: Path
) -> None:
    code, run = runs.finish(tmp_path, runs.job(**{"cluster": {"devices": 4}, **changes()}))
    assert code == 0, run.output
    assert [len(batch) for batch in alone.batches()] == [6 * 4] * 3
    assert run.batches() == alone.batches()
    assert run.weights() == alone.weights()
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3]


def in_replicas(slots: int) -> dict[str, Any]:
    policy = {"use": "trouble/recording", "slots": slots, "config": {"replica": 2}}
    return runs.job(cluster={"devices": slots}, controller={"shards": 2}, roles={"policy": policy})


def test_workers_that_hold_one_replica_together_get_the_same_records(
    alone: Any, tmp_path: Path
) -> None:
    code, run = runs.finish(tmp_path, in_replicas(2))
    assert code == 0, run.output
    assert sorted(run.batches()) == sorted([*alone.batches(), *alone.batches()])
    assert run.weights() == alone.weights()


def test_slots_that_hold_no_whole_replicas_are_refused(tmp_path: Path) -> None:
    code, run = runs.finish(tmp_path, in_replicas(3))
    assert code == 2
    assert (
        "roles.policy.slots: 3 slots cannot be divided into replicas of 2 slots each." in run.output
    )


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.protects
def test_controllers_are_processes_of_their_own_without_torch(tmp_path: Path) -> None:
    config = runs.job(**ENDLESS, controller={"shards": 4})
    with runs.running(tmp_path, config) as run:
        run.read_until(" 1/")
        pids = run.pids()
        controllers = {f"controller.{shard}": pids[f"controller.{shard}"] for shard in range(4)}
        assert len({*pids.values(), run.process.pid}) == len(pids) + 1
        assert set(pids) == {*controllers, "agent.0", "policy.0", "rollout.0", "scorer.0"}
        workers = set(pids.values()) - {pids["agent.0"]}
        assert workers == set(runs.children(pids["agent.0"]))
        for name, pid in controllers.items():
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "numpy" in maps, name
            assert "torch" not in maps, name
        assert os.getsid(run.supervisor()) == run.process.pid
        sessions = {os.getsid(pid) for pid in [run.process.pid, *pids.values()]}
        assert len(sessions) == len(pids) + 1  # Ctrl-C in the terminal reaches the supervisor alone
    used = run.metrics()[-1]
    assert {name for name in used if name.startswith("cpu_seconds/controller.")} == {
        f"cpu_seconds/{name}" for name in controllers
    }


def await_file(path: Path) -> None:
    deadline_s = time.monotonic() + runs.PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, path
        time.sleep(0.01)


def nothing_is_left(run: Any, store: Path, watched: Any, timeout_s: float) -> None:
    assert watched.all_end_within(timeout_s), "a process survives"
    assert not store.exists()
    assert list(run.private.iterdir()) == []


@pytest.mark.protects
def test_no_process_or_file_is_left_after_a_normal_end(tmp_path: Path) -> None:
    with runs.running(tmp_path, runs.job(run={"steps": 30})) as run:
        run.read_until(" 1/")
        store, watched = run.store(), runs.Watched(list(run.pids().values()))
        assert store.is_dir()
        assert run.wait() == 0, run.output
        nothing_is_left(run, store, watched, 0)


@pytest.mark.protects
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_leaves_no_process_or_file(
    number: int, code: int, tmp_path: Path
) -> None:
    with runs.running(tmp_path, runs.job(**ENDLESS)) as run:
        run.read_until(" 2/")
        store, watched = run.store(), runs.Watched(list(run.pids().values()))
        os.kill(run.process.pid, number)
        assert run.wait() == code, run.output
        nothing_is_left(run, store, watched, 0)
    assert "stopped; every process has ended" in run.output
    assert "Traceback" not in run.output
    assert run.metrics()[-1]["step"] >= 2


def test_a_run_in_the_background_of_a_script_ends_by_sigterm(tmp_path: Path) -> None:
    """There a shell has interrupts ignored, and what it starts inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with runs.running(tmp_path, runs.job(**ENDLESS)) as run:
            run.read_until(" 1/")
            os.kill(run.process.pid, signal.SIGINT)
            run.read_until(" 200/")
            os.kill(run.process.pid, signal.SIGTERM)
            assert run.wait() == 143, run.output
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_while_the_run_ends_does_not_leave_its_processes_to_themselves(
    tmp_path: Path,
) -> None:
    """A scorer is stopped, so the agent gives it its two seconds before it kills it."""
    config = runs.job(checkpoint={"every": 1}, run={"steps": 3})
    config["roles"]["policy"] = {"use": "trouble/halts"}
    (tmp_path / "halt save").touch()
    with runs.running(tmp_path, config) as run:
        run.read_until(" 2/")
        await_file(tmp_path / "at save")  # nothing is scored from here on
        pids = run.pids()
        watched = runs.Watched(runs.descendants(run.process.pid))
        os.kill(pids["scorer.0"], signal.SIGSTOP)
        (tmp_path / "go on").touch()
        lead = runs.Watched([pids["controller.0"]])
        assert lead.all_end_within(runs.PATIENCE_S)
        lead.close()
        os.kill(run.process.pid, signal.SIGINT)
        run.wait()
        assert watched.all_end_within(0), "a process survives"
        assert list(run.private.iterdir()) == []
    assert run.weights()


def test_a_signal_during_start_ends_the_run(tmp_path: Path) -> None:
    with runs.running(tmp_path, runs.job(**ENDLESS)) as run:
        run.read_until("starting 5 processes")
        watched = runs.Watched(runs.descendants(run.process.pid))
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130, run.output
        assert watched.all_end_within(10)
        assert list(run.private.iterdir()) == []


@pytest.mark.protects
@pytest.mark.parametrize("first", [True, False])
def test_all_workers_end_when_the_supervisor_or_the_process_before_it_is_killed(
    first: bool, tmp_path: Path
) -> None:
    """Without a checkpoint nobody can go on."""
    with runs.running(tmp_path, runs.job(**ENDLESS)) as run:
        run.read_until(" 2/")
        supervisor = run.supervisor()
        store, watched = run.store(), runs.Watched([supervisor, *run.pids().values()])
        os.kill(run.process.pid if first else supervisor, signal.SIGKILL)
        assert run.wait() == (-signal.SIGKILL if first else 5)
        nothing_is_left(run, store, watched, 10)
    if not first:
        assert "supervisor: ended with signal SIGKILL\n" in run.output
        assert f"the run is in {run.path}" in run.output


@pytest.mark.protects
def test_all_workers_end_when_the_agent_is_killed_and_the_run_reports_it(tmp_path: Path) -> None:
    with runs.running(tmp_path, runs.job(**ENDLESS)) as run:
        run.read_until(" 2/")
        store, pids = run.store(), run.pids()
        watched = runs.Watched(list(pids.values()))
        os.kill(pids["agent.0"], signal.SIGKILL)
        assert run.wait() == 5, run.output
        nothing_is_left(run, store, watched, 10)
    assert re.search(r"^agent\.0: the process is gone$", run.output, re.MULTILINE)


@pytest.mark.parametrize("name", ["rollout.0", "policy.0"])
def test_a_stopped_worker_ends_with_its_killed_agent(name: str, tmp_path: Path) -> None:
    """It cannot read its lifeline."""
    with runs.running(tmp_path, runs.job(**ENDLESS)) as run:
        run.read_until(" 2/")
        pids = run.pids()
        watched = runs.Watched(list(pids.values()))
        os.kill(pids[name], signal.SIGSTOP)
        os.kill(pids["agent.0"], signal.SIGKILL)
        assert run.wait() == 5, run.output
        assert watched.all_end_within(10)


def test_a_stopped_agent_and_its_stopped_worker_end_with_the_killed_supervisor(
    tmp_path: Path,
) -> None:
    with runs.running(tmp_path, runs.job(**ENDLESS)) as run:
        run.read_until(" 2/")
        store, pids = run.store(), run.pids()
        watched = runs.Watched(list(pids.values()))
        os.kill(pids["rollout.0"], signal.SIGSTOP)
        os.kill(pids["agent.0"], signal.SIGSTOP)
        run.process.kill()
        run.wait()
        nothing_is_left(run, store, watched, 10)


# -- files of engines -----------------------------------------------------------------------------


SHARES: dict[str, Any] = {"roles": {"rollout": {"use": "trouble/shares"}}}


def shared_files(run: Any) -> list[Path]:
    """What each start of the generator has made in shared memory, the first first."""
    return [Path(line) for line in (run.directory / "shared.txt").read_text().splitlines()]


@pytest.fixture
def foreign_file() -> Iterator[Path]:
    """A file of another run: its name is of the same kind."""
    path = Path(f"/dev/shm/gctrouble_{os.getpid()}")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_a_killed_generator_leaves_nothing_in_shared_memory_and_no_child(
    foreign_file: Path, tmp_path: Path
) -> None:
    with runs.running(tmp_path, runs.job(**ENDLESS, **SHARES)) as run:
        run.read_until(" 1/")
        worker = run.pids()["rollout.0"]
        child = runs.Watched(runs.children(worker))
        os.kill(worker, signal.SIGKILL)
        run.read_until("it is started again")
        run.read_until("step ")  # drawn by the second one
        first, second = shared_files(run)
        assert not first.exists()
        assert second.exists()
        assert child.all_end_within(10)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 143, run.output
    assert not second.exists()
    assert foreign_file.exists()


def test_a_killed_agent_leaves_nothing_in_shared_memory_and_no_child(
    foreign_file: Path, tmp_path: Path
) -> None:
    with runs.running(tmp_path, runs.job(**ENDLESS, **SHARES)) as run:
        run.read_until(" 1/")
        pids = run.pids()
        child = runs.Watched(runs.children(pids["rollout.0"]))
        os.kill(pids["rollout.0"], signal.SIGSTOP)
        os.kill(pids["agent.0"], signal.SIGKILL)
        assert run.wait() == 5, run.output
        assert child.all_end_within(10)
    (file,) = shared_files(run)
    assert not file.exists()
    assert foreign_file.exists()
    assert not (run.path / "logs" / "processes.json").exists()


# -- workers that fail -----------------------------------------------------------------------------


@pytest.mark.protects
@pytest.mark.parametrize("name", ["policy.0", "controller.1"])
def test_a_lost_trainer_or_controller_ends_a_run_without_checkpoints_and_is_named(
    name: str, tmp_path: Path
) -> None:
    with runs.running(tmp_path, runs.job(**ENDLESS)) as run:
        run.read_until(" 2/")
        store, pids = run.store(), run.pids()
        watched = runs.Watched(list(pids.values()))
        os.kill(pids[name], signal.SIGKILL)
        assert run.wait() == 5, run.output
        nothing_is_left(run, store, watched, 0)
    assert f"\n{name}: ended with signal SIGKILL\n" in run.output
    assert f"  its log: {run.path}/logs/{name}.log" in run.output


@pytest.mark.protects
@pytest.mark.parametrize(
    ("changes", "code", "wanted"),
    [
        (
            {"roles": {"rollout": {"use": "trouble/raises"}}},
            5,
            [r"^rollout\.0: RuntimeError: no such device$", r"^  at .*trouble\.py:\d+$"],
        ),
        (
            {"roles": {"rollout": {"use": "trouble/leaves"}}},
            5,
            [
                r"^rollout\.0: ended with exit code 3 while the run was starting$",
                r"^  about to leave$",
                r"^  its log: .*/logs/rollout\.0\.log$",
            ],
        ),
        (
            {"rewards": {"letters": {"use": "trouble/leaves"}}},
            5,
            [r"^scorer\.0: ended with exit code 3 while the run was starting$"],
        ),
        (
            {"rewards": {"letters": {"use": "trouble/raises"}}},
            5,
            [r"^scorer\.0: RuntimeError: no such device$"],
        ),
        (
            {"rewards": {"letters": {"use": "trouble/noluck"}}},
            6,
            [
                r"^rewarding: 6 of 6 groups could not be used$",
                r"^  rewards\.letters: ValueError: no luck \(\S+\.py:\d+\)$",
            ],
        ),
        (
            {"rewards": {"letters": {"use": "trouble/nan"}}},
            6,
            [
                r"^rewarding: 6 of 6 groups could not be used$",
                r"^  rewards\.letters: the reward is nan$",
            ],
        ),
        (
            {"roles": {"rollout": {"use": "trouble/gap"}}},
            6,
            [
                (
                    r"^step 0: generator and trainer disagree by 0\.5 in the log-prob of an "
                    r"action, "
                    r"the band is 0\.001$"
                )
            ],
        ),
    ],
    ids=[
        "factory-raises",
        "factory-leaves",
        "scorer-leaves",
        "scorer-raises",
        "no-luck",
        "nan",
        "gap",
    ],
)
@pytest.mark.parametrize("launcher", ["core/local", "core/inline"])
def test_a_failure_ends_the_run_with_its_cause(
    launcher: str, changes: dict[str, Any], code: int, wanted: list[str], tmp_path: Path
) -> None:
    if launcher == "core/inline" and "leaves" in str(changes):
        pytest.skip("inline, a factory that leaves takes the whole run with it")
    config = runs.job(**{**changes, "launcher": {"use": launcher}})
    config["roles"] = {**runs.JOB["roles"], **config["roles"]}
    found, run = runs.finish(tmp_path, config)
    assert found == code, run.output
    for line in wanted:
        assert re.search(line, run.output, re.MULTILINE), run.output
    assert "Traceback" not in run.output


def test_a_hanging_scorer_is_restarted_and_the_run_continues(tmp_path: Path) -> None:
    config = runs.job(
        rewards={"letters": {"use": "trouble/hangsonce", "timeout_s": 1.0}},
        controller={"shards": 2, "config": {"prompts": 6, "failure_limit": 1.0}},
    )
    code, run = runs.finish(tmp_path, config)
    assert code == 0, run.output
    assert "scorer.0 ended with exit code 75; it is started again" in run.output
    assert "rewards.letters.timeout_s gives it more time" in run.output
    first, *others = run.metrics()[1:]
    assert first["groups/dropped/reward_failed"] >= 1
    assert first["groups/quarantined"] == first["groups/dropped/reward_failed"]
    assert [row["groups/trained"] for row in (first, *others)] == [6] * 3
    assert not any("groups/quarantined" in row for row in others)
    assert (
        "no answer within 1 s; the scorer is started again"
        in (run.path / "logs" / "scorer.0.log").read_text()
    )


@pytest.mark.protects
@pytest.mark.parametrize("reward", ["holdslock", "disarms", "holdsloop"])
def test_a_batch_whose_reward_holds_the_interpreter_times_out_and_the_run_goes_on(
    reward: str, tmp_path: Path
) -> None:
    """Its time limit is not looked at meanwhile: not by a function, and not by a coroutine's loop.

    What the reward does with signals and timers makes no difference to the limit, nor that to it.
    """
    config = runs.job(
        rewards={"letters": {"use": f"trouble/{reward}", "timeout_s": 1.0}},
        controller={"shards": 1, "config": {"prompts": 6, "failure_limit": 1.0}},
    )
    code, run = runs.finish(tmp_path, config)
    assert code == 0, run.output
    assert (
        "scorer.0 ended with signal SIGKILL; it is started again\n"
        "  rewards.letters held the process for longer than rewards.letters.timeout_s" in run.output
    )
    first, *others = run.metrics()[1:]
    assert 1 <= first["groups/quarantined"] == first["groups/dropped/reward_failed"] <= 6
    assert not any("groups/quarantined" in row for row in others), "it was asked again"
    assert [row["groups/trained"] for row in (first, *others)] == [6] * 3
    log = (run.path / "logs" / "scorer.0.log").read_text()
    assert "rewards.letters: held the process beyond the time limit while " in log
    assert "were scored, which have timed out; rewards.letters.timeout_s bounds it" in log
    assert "most recent call first" in log, "its stacks"
    assert not (tmp_path / "rung").exists(), "its handler has seen a signal of the core"


# -- before the first process ----------------------------------------------------------------------


def test_an_explicit_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    config = runs.job(run={"steps": 1, "dir": str(tmp_path / "out")})
    assert runs.finish(tmp_path, config)[0] == 0
    before = sorted((tmp_path / "out").rglob("*"))
    code, run = runs.finish(tmp_path, config)
    assert code == 2, run.output
    assert str(tmp_path / "out") in run.output
    assert sorted((tmp_path / "out").rglob("*")) == before


@pytest.mark.parametrize("place", [0, 1, 5], ids=["supervisor", "agent", "a-worker"])
def test_a_port_in_use_is_reported_before_anything_starts(place: int, tmp_path: Path) -> None:
    port = free_ports(8)
    with socket.create_server(("127.0.0.1", port + place)):
        code, run = runs.finish(tmp_path, runs.job(launcher={"config": {"port": port}}))
    assert code == 7, run.output
    assert f"tcp:127.0.0.1:{port + place}: the address is in use" in run.output
    assert "launcher.config.port" in run.output


def test_a_socket_directory_whose_path_is_too_long_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    code, run = runs.finish(tmp_path, runs.job(launcher={"config": {"socket_dir": str(long)}}))
    assert code == 7, run.output
    assert "the system allows 107" in run.output
    assert "launcher.config.socket_dir" in run.output
    assert list(long.iterdir()) == []


def test_a_socket_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    code, run = runs.finish(
        tmp_path, runs.job(launcher={"config": {"socket_dir": str(tmp_path / "absent")}})
    )
    assert code == 7, run.output
    assert f"launcher.config.socket_dir: {tmp_path / 'absent'}" in run.output


def test_a_run_ends_with_the_step_that_consumes_its_epochs(tmp_path: Path) -> None:
    """64 rows, 6 prompts a step: half of them are consumed by the sixth step."""
    code, run = runs.finish(tmp_path, runs.job(run={"steps": 1000, "epochs": 0.5}))
    assert code == 0, run.output
    assert [row["step"] for row in run.metrics()][-1] == 6
    assert (run.path / "weights").is_dir(), "the end is the run's end"


def test_a_policy_that_has_nothing_left_to_learn_ends_its_run_well(tmp_path: Path) -> None:
    job = runs.job(run={"steps": 9}, checkpoint={"every": 1}, filter={"use": "core/varied"})
    job["rewards"]["letters"]["weight"] = 0
    job["controller"]["config"] |= {"max_rounds": 1, "max_skipped_steps": 2}
    code, run = runs.finish(tmp_path, job)
    assert code == 0, run.output
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    assert "the run ends: 2 steps in a row had no group to train on" in run.output
    assert run.weights()
    assert (run.path / "checkpoints" / "step-000002").is_dir()
