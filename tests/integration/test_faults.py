"""Processes of a run are killed while it goes on: it ends, with the weights and the prompts of the
undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import runs

PROMPTS = 6
RECIPES = Path(__file__).parents[2] / "recipes"


def config(steps: int, restarts: int) -> dict[str, Any]:
    found: dict[str, Any] = runs.job(
        run={"steps": steps, "deterministic": True}, checkpoint={"every": 1, "restarts": restarts}
    )
    found["roles"] = {
        "policy": {"use": "trouble/recording"},
        "rollout": {"use": "fake", "slots": 2},
    }
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """The undisturbed run of so many steps, which its tests share."""

    @cache
    def run(steps: int) -> Any:
        code, run = runs.finish(tmp_path_factory.mktemp("calm"), config(steps, 0))
        assert code == 0, run.output
        return run

    return run


def consumed(run: Any) -> dict[int, list[list[int]]]:
    """What each step trained on, by its lowest ordinal; of a step that was made twice, the
    latest.
    """
    return {min(ordinal for ordinal, _ in batch): batch for batch in run.batches()}


def latest_pids(run: Any) -> dict[str, int]:
    """Worker -> pid of its latest start, and the supervisor. Those that have ended are left out."""
    told = (run.path / "logs" / "agent.0.log").read_text()
    found = {name: int(pid) for name, pid in re.findall(r"INFO (\S+) is started, pid (\d+)", told)}
    found["supervisor"] = run.supervisor()
    return {name: pid for name, pid in found.items() if Path(f"/proc/{pid}").exists()}


@pytest.mark.protects
@pytest.mark.parametrize("victim", ["rollout.0", "rollout.1", "scorer.0"])
def test_a_killed_generator_or_scorer_is_restarted_and_nothing_is_lost(
    victim: str, calm: Callable[[int], Any], tmp_path: Path
) -> None:
    steps = 6
    still = calm(steps)
    with runs.running(tmp_path / "killed", config(steps, 0)) as run:
        run.read_until(f" 2/{steps} ")
        os.kill(latest_pids(run)[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    told = f"{victim} ended with signal SIGKILL; it is started again"
    assert told in run.output
    assert told in (run.path / "logs" / "supervisor.log").read_text()
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)


@pytest.mark.protects
@pytest.mark.parametrize(
    "victim", ["rollout.0", "scorer.0", "policy.0", "controller.0", "controller.1"]
)
def test_a_hanging_process_is_killed_and_its_waiting_caller_is_named(
    victim: str, calm: Callable[[int], Any], tmp_path: Path
) -> None:
    steps = 16  # it must not end before the test has stopped a process
    still = calm(steps)
    patient = config(steps, 1)
    patient["run"]["patience_s"] = 3.0
    with runs.running(tmp_path / "stopped", patient) as run:
        run.read_until(f" 2/{steps} ")
        os.kill(latest_pids(run)[victim], signal.SIGSTOP)
        assert run.wait() == 0, run.output
    assert re.search(
        rf"\S+ waits for {re.escape(victim)}: no sign of progress for 3 s in \w+", run.output
    )
    assert "most recent call first" in (run.path / "logs" / f"{victim}.log").read_text(), (
        "its stacks"
    )
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)


def test_a_process_stopped_in_a_push_is_detected_long_before_the_push_times_out(
    tmp_path: Path,
) -> None:
    steps = 4
    job = config(steps, 1)
    job["run"]["patience_s"] = 3.0
    job["roles"]["rollout"] = {"use": "trouble/freezes"}
    with runs.running(tmp_path / "stopped", job) as run:
        assert run.wait() == 0, run.output
    assert re.search(
        r"waits for rollout\.0: no sign of progress for 3 s in (push\.pull|alive)", run.output
    )
    job["roles"]["rollout"] = {"use": "fake"}
    code, still = runs.finish(tmp_path / "calm", job)
    assert code == 0, still.output
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)


def test_a_process_that_is_stopped_as_it_starts_is_ended_and_started_again(tmp_path: Path) -> None:
    """Nobody can ask it anything, so no caller's deadline finds it."""
    steps = 2
    job = config(steps, 0)
    job["run"]["patience_s"] = 2.0
    job["roles"]["rollout"] = {"use": "trouble/stops"}
    with runs.running(tmp_path, job) as run:
        assert run.wait() == 0, run.output
    assert re.search(
        r"rollout\.0 ended with signal SIGKILL; it is started again\n"
        r" +it was stopped for 4 s, twice run\.patience_s",
        run.output,
    ), run.output


def test_a_generator_that_is_started_again_in_vain_sends_the_run_back_to_its_checkpoint(
    tmp_path: Path,
) -> None:
    steps = 4
    job = config(steps, 1)
    job["roles"]["rollout"] = {"use": "trouble/crashes"}
    tmp_path.joinpath("crashes").mkdir()
    crash = tmp_path / "crashes" / "crash"
    crash.touch()
    with runs.running(tmp_path / "crashes", job) as run:
        run.read_until("the run goes on from step 2")
        crash.unlink()
        assert run.wait() == 0, run.output
    assert run.output.count("rollout.0 ended with signal SIGKILL; it is started again") == 5
    assert re.search(
        r"rollout\.0: it was started again 5 times in a row and has answered no request\n"
        r" +the last time it ended with signal SIGKILL\n"
        r"( +.*\n)* +no memory for the cache of keys\n"
        r" +its log: \S+/rollout\.0\.log\n",
        run.output,
    ), run.output
    job["roles"]["rollout"] = {"use": "fake"}
    code, still = runs.finish(tmp_path / "calm", job)
    assert code == 0, still.output
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)


@pytest.mark.parametrize("what", ["load", "commit"])
def test_a_hanging_engine_in_a_push_is_detected_although_its_process_answers(
    what: str, tmp_path: Path
) -> None:
    """It alone is lost, not who waits for it, nor the trainer, and the push is begun anew."""
    steps = 4
    job = config(steps, 0)
    job["run"]["patience_s"] = 3.0
    job["controller"]["config"] = {"prompts": PROMPTS, "push_bucket_bytes": 1}  # a tensor a bucket
    job["roles"]["rollout"] = {"use": "trouble/hangs", "slots": 2}
    tmp_path.joinpath("stopped").mkdir()
    (tmp_path / "stopped" / f"hang {what}").touch()
    with runs.running(tmp_path / "stopped", job) as run:
        told = run.read_until("it is killed")
        noticed_s = time.time() - (run.directory / "hung").stat().st_mtime
        assert run.wait() == 0, run.output
    found = re.match(
        r".*controller\.0 waits for (rollout\.\d): no sign of progress for 3 s in push\.pull", told
    )
    assert found is not None, told
    log = (run.path / "logs" / f"{found[1]}.log").read_text()
    assert "in _hang" in log, "its stacks"
    assert run.output.count("it is killed") == 1
    assert run.output.count("ended with signal SIGKILL; it is started again") == 1
    assert noticed_s < 10, "patience is 3 s"
    print(f"noticed after {noticed_s:.1f} s")
    code, still = runs.finish(tmp_path / "calm", job)
    assert code == 0, still.output
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)


def stopped_agent(run: Any) -> tuple[Any, float]:
    """Stops the node agent: (all processes but the supervisor, seconds until somebody noticed)."""
    pids = run.pids()
    watched = runs.Watched(list(pids.values()))
    began_s = time.monotonic()
    os.kill(pids["agent.0"], signal.SIGSTOP)
    run.read_until("waits for agent.0: no sign of progress for 3 s in alive")
    return watched, time.monotonic() - began_s


@pytest.mark.protects
def test_a_hanging_agent_is_killed_and_the_run_continues_from_its_checkpoint(
    calm: Callable[[int], Any], tmp_path: Path
) -> None:
    steps = 40  # more than are made while it is awake to write its stacks
    still = calm(steps)
    patient = config(steps, 1)
    patient["run"]["patience_s"] = 3.0
    with runs.running(tmp_path / "stopped", patient) as run:
        run.read_until(f" 2/{steps} ")
        watched, noticed_s = stopped_agent(run)
        run.read_until("the run goes on from step")
        assert watched.all_end_within(10)
        assert run.wait() == 0, run.output
    assert "most recent call first" in (run.path / "logs" / "agent.0.log").read_text(), "its stacks"
    print(f"noticed after {noticed_s:.1f} s")
    assert noticed_s < 10, "patience is 3 s"
    assert run.weights() == still.weights()
    assert consumed(run) == consumed(still)


@pytest.mark.parametrize("when", ["waiting for", " 1/200 "])
def test_a_hanging_agent_ends_a_run_without_checkpoints_with_that_reason(
    when: str, tmp_path: Path
) -> None:
    job = config(200, 1)
    job["run"]["patience_s"], job["checkpoint"]["every"] = 3.0, 0
    with runs.running(tmp_path, job) as run:
        run.read_until(when)
        store = run.store()
        watched, noticed_s = stopped_agent(run)
        assert run.wait() == 5, run.output
        assert watched.all_end_within(10)
        assert not store.exists()
    what = (
        "agent.0: the process is gone\n  the workers of its node end with it, and so does the "
        "store\n"
    )
    assert f"{what}  its log: {run.path}/logs/agent.0.log\n" in run.output
    assert noticed_s < 10, "patience is 3 s"


def quickstart(steps: int, restarts: int) -> dict[str, Any]:
    """The recipe's job, of torch processes; smaller, so that its steps are short."""
    found = yaml.safe_load(
        (RECIPES / "quickstart.yaml").read_text().replace("quickstart/", f"{RECIPES}/quickstart/")
    )
    found["run"] |= {"name": "fake", "steps": steps, "deterministic": True}
    found["checkpoint"] = {"every": 1, "restarts": restarts}
    found["cluster"], found["launcher"] = {"devices": 3}, {"use": "core/local"}
    found["controller"]["config"]["prompts"] = PROMPTS
    found["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 40}
    found["roles"]["rollout"]["slots"] = 2
    del found["plugins"], found["evaluation"]
    return dict(found)


@pytest.mark.protects
@pytest.mark.parametrize(
    ("job", "faults", "steps"),
    [
        pytest.param(config, 3, 60, id="3 of fakes"),
        pytest.param(config, 30, 600, id="30 of fakes", marks=pytest.mark.slow),
        pytest.param(quickstart, 30, 180, id="30 of the quickstart", marks=pytest.mark.slow),
    ],
)
def test_random_kills_and_stops_do_not_change_the_result_of_a_run(
    job: Callable[[int, int], dict[str, Any]], faults: int, steps: int, tmp_path: Path, capsys: Any
) -> None:
    code, still = runs.finish(tmp_path / "calm", job(steps, 0))
    assert code == 0, still.output
    draw, took_s = random.Random(faults), dict[signal.Signals, list[float]]()
    kinds = ["rollout.0", "rollout.1", "scorer.0", "policy.0", "controller.0", "controller.1"]
    plan = [
        (kinds[i % len(kinds)], (signal.SIGKILL, signal.SIGSTOP)[(i + i // len(kinds)) % 2])
        for i in range(faults)
    ]
    # One that is stopped is no fault: it goes on where it was.
    plan += [("supervisor", signal.SIGKILL)] * (faults // len(kinds))
    draw.shuffle(plan)
    patient = job(steps, len(plan))
    patient["run"]["patience_s"] = 3.0 if job is config else 10.0
    with runs.running(tmp_path / "killed", patient) as run:
        for victim, number in plan:
            pid = None
            while pid is None:  # the one killed before took it along, or it is being started
                run.read_until("step ")
                time.sleep(draw.uniform(0, 0.3))  # anywhere in a step
                pid = latest_pids(run).get(victim)
            made, began_s = max(row["step"] for row in run.metrics()), time.monotonic()
            os.kill(pid, number)
            while int(run.read_until(f"/{steps} ").split("/")[0].split()[-1]) < made + 2:
                pass  # the next one may have been all but over; or it went back to a checkpoint
            took_s.setdefault(number, []).append(time.monotonic() - began_s)
        assert run.wait() == 0, run.output
    for file in (still.path / "weights").iterdir():
        assert (run.path / "weights" / file.name).read_bytes() == file.read_bytes(), file.name
    if job is config:
        assert consumed(run) == consumed(still)
    position = json.loads((run.path / "position.json").read_text())
    assert position["next_ordinal"] == steps * PROMPTS
    ended = len(
        re.findall(
            r"ended with signal SIGKILL",
            run.output + (run.path / "logs/supervisor.log").read_text(),
        )
    )
    assert ended >= len(plan), "somebody was not killed: this tests nothing"
    with capsys.disabled():
        for number, seconds in took_s.items():
            print(
                f"\n{number.name}: {statistics.median(seconds):.1f} s until it works again, "
                f"median of {len(seconds)}"
            )
