"""A run that was killed goes on: the same prompts, the same weights, on other numbers of processes
too.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gcore.finished import Run
from gcore_tools.export.of_run import export

from gcore_core.contract.errors import DataError
from gcore_core.run.manifest import inspect
from gcore_core.run.supervised import hold_run
from tests.support import runs

STEPS = 6


def config(**changes: Any) -> dict[str, Any]:
    return runs.job(run={"steps": STEPS, "deterministic": True}, checkpoint={"every": 1}, **changes)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    code, run = runs.finish(tmp_path_factory.mktemp("calm"), config())
    assert code == 0, run.output
    return run


@contextmanager
def resumed(run: Any, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """``g-core resume``, just started; it has ended when the block does."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            *f"-m gcore_core resume {run.path} launcher.config.socket_dir=/tmp".split(),
            *overrides,
        ],
        cwd=run.directory,
        env={
            **os.environ,
            "PYTHONPATH": f"{runs.REPOSITORY}:{run.directory}",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()  # the agent ends the rest


def resume(run: Any, *overrides: str) -> subprocess.CompletedProcess[str]:
    with resumed(run, *overrides) as process:
        told = process.communicate(timeout=runs.PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, *told)


def killed_at(directory: Path, step: int) -> Any:
    """A run whose supervisor is killed once it has told of the step."""
    with runs.running(directory, config()) as run:
        run.read_until(f"step {step}/{STEPS}")
        run.process.kill()
    return run


def last_batches(run: Any) -> dict[int, list[list[int]]]:
    """What each step trained on, by its lowest ordinal; of a step that was made twice, the
    latest.
    """
    return {min(ordinal for ordinal, _ in batch): batch for batch in run.batches()}


@pytest.mark.protects
@pytest.mark.parametrize(
    "overrides",
    [[], ["controller.shards=1"], ["controller.shards=4", "roles.rollout.slots=2"]],
    ids=["as it was", "one shard", "four shards, two replicas"],
)
def test_a_resumed_run_ends_as_if_it_had_not_been_killed(
    overrides: list[str], calm: Any, tmp_path: Path
) -> None:
    run = killed_at(tmp_path, 3)
    done = resume(run, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.weights() == calm.weights()
    assert last_batches(run) == last_batches(calm), "every prompt is consumed once"
    position = json.loads((run.path / "position.json").read_text())
    assert position["next_ordinal"] == STEPS * 6


@pytest.mark.protects
@pytest.mark.parametrize("victim", ["policy.0", "controller.1", "controller.0"])
def test_a_run_continues_from_its_newest_checkpoint_after_losing_a_trainer_or_controller(
    victim: str, calm: Any, tmp_path: Path
) -> None:
    with runs.running(tmp_path, config()) as run:
        run.read_until(f"step 3/{STEPS}")
        os.kill(run.pids()[victim], signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert "the run goes on from step" in run.output
    assert run.weights() == calm.weights()
    assert last_batches(run) == last_batches(calm)


@pytest.mark.parametrize("trainer", ["recording", "halts"], ids=["at once", "in the background"])
def test_a_step_that_fails_does_not_cost_the_checkpoint_of_the_step_before(
    trainer: str, calm: Any, tmp_path: Path
) -> None:
    job = config()
    job["roles"]["policy"]["use"] = f"trouble/{trainer}"
    job["rewards"] = {"letters": {"use": "trouble/nomore"}}
    code, run = runs.finish(tmp_path, job)
    assert code != 0
    assert "the checkpoint of step 2 was being saved and is whole" in run.output
    assert (run.path / "checkpoints" / "step-000002").is_dir()
    (tmp_path / "mended").touch()
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.weights() == calm.weights()


def halted(directory: Path, what: str, **changes: Any) -> Any:
    """A run that is about to halt at ``what`` of its third step, or in the save of it."""
    directory.mkdir(exist_ok=True)
    (directory / f"halt {what}").touch()
    roles = {"policy": {"use": "trouble/halts"}, "rollout": {"use": "trouble/halting"}}
    return runs.running(directory, config() | {"roles": roles} | changes)


def wait_for(run: Any, name: str) -> None:
    """Until a process of the run has come to where it halts."""
    while not (run.directory / name).exists():
        assert run.process.poll() is None, run.output
        time.sleep(0.01)


def saved(run: Any) -> list[str]:
    return sorted(
        path.name for path in (run.path / "checkpoints").glob("step-*") if path.name[-1].isdigit()
    )


@pytest.mark.protects
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    ("what", "every", "found"),
    [
        ("rollout", 0, ["step-000002"]),
        ("rollout", 1, ["step-000001", "step-000002"]),
        ("evaluation", 0, ["step-000002"]),
        ("train", 0, ["step-000003"]),
        ("save", 1, ["step-000001", "step-000002", "step-000003"]),
    ],
)
def test_a_run_ended_by_a_signal_saves_its_last_finished_step(
    what: str, every: int, found: list[str], number: int, code: int, calm: Any, tmp_path: Path
) -> None:
    evaluation = {"every": 1, "prompts": 4, "data": {"use": "fake"}} if what == "evaluation" else {}
    with halted(tmp_path, what, checkpoint={"every": every}, evaluation=evaluation) as run:
        wait_for(run, f"at {what}")
        os.kill(run.process.pid, number)
        run.read_until("its state is being saved")
        if what in ("train", "save"):  # a step's training goes on to its end
            (tmp_path / "go on").touch()
        assert run.wait() == code, run.output
    assert saved(run) == found
    assert f"go on from step {int(found[-1][5:])} with: g-core resume" in run.output
    (tmp_path / "go on").touch()
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.weights() == calm.weights()
    assert last_batches(run) == last_batches(calm)


@pytest.mark.slow
def test_a_run_stopped_repeatedly_gives_the_same_weights(tmp_path: Path) -> None:
    steps, draw = 60, random.Random(1)
    job = config() | {
        "run": {**config()["run"], "steps": steps},
        "checkpoint": {"every": 3, "last": steps},
    }
    code, still = runs.finish(tmp_path / "calm", job)
    assert code == 0, still.output
    with runs.running(tmp_path / "ended", job) as run:
        run.read_until(" 2/")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 143, run.output
    found = []
    while saved(run)[-1] != f"step-{steps:06d}":
        found.append(saved(run)[-1])
        with resumed(run) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if f"/{steps} " in line)
            time.sleep(draw.uniform(0, 0.3))  # anywhere in a step, or in a save
            process.send_signal(draw.choice([signal.SIGTERM, signal.SIGINT]))
            code = process.wait(30)
            over = (
                saved(run)[-1] == f"step-{steps:06d}"
            )  # then nobody listens for a signal any more
            assert code in (130, 143, 0) or (over and code in (-signal.SIGTERM, -signal.SIGINT)), (
                process.communicate()
            )
    assert found == sorted(set(found)), "each time a step further"
    assert len(found) > 3
    assert resume(run).returncode == 0
    assert run.weights() == still.weights()
    assert last_batches(run) == last_batches(still)


def test_a_run_stopped_in_its_first_rollout_saves_its_initial_state(
    calm: Any, tmp_path: Path
) -> None:
    with halted(tmp_path, "begin", checkpoint={"every": 0}) as run:
        wait_for(run, "at begin")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 143, run.output
    assert saved(run) == ["step-000000"]
    (tmp_path / "go on").touch()
    assert resume(run).returncode == 0
    assert run.weights() == calm.weights()
    assert last_batches(run) == last_batches(calm)


def test_a_training_step_that_does_not_end_in_time_is_abandoned(calm: Any, tmp_path: Path) -> None:
    with halted(tmp_path, "train") as run:
        wait_for(run, "at train")
        began_s = time.monotonic()
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130, run.output
        assert time.monotonic() - began_s < 10
    assert saved(run) == ["step-000001"], (
        "the save of the second step was to be finished after the third"
    )
    (tmp_path / "go on").touch()
    assert resume(run).returncode == 0
    assert run.weights() == calm.weights()


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    with halted(tmp_path, "train", checkpoint={"every": 0}) as run:
        wait_for(run, "at train")
        os.kill(run.process.pid, signal.SIGTERM)
        run.read_until("its state is being saved")
        began_s = time.monotonic()
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 143, run.output
        assert time.monotonic() - began_s < 6
    assert saved(run) == []
    assert "stopped; every process has ended" in run.output


def groups(run: Any) -> dict[int, dict[str, float]]:
    """The group counts of each step that was made, as it was made last."""
    counts = {
        row["step"]: row["metrics"] for row in run.metrics() if "groups/issued" in row["metrics"]
    }
    return {
        step: {name[7:]: round(value) for name, value in row.items() if name.startswith("groups/")}
        for step, row in counts.items()
    }


def stale(run: Any) -> dict[int, list[Any]]:
    """By step, the records that older weights had sampled, as its trainer got them."""
    lines = [json.loads(line) for line in (run.directory / "stale.jsonl").read_text().splitlines()]
    found: dict[int, list[Any]] = {}
    for version, *record in lines:
        found.setdefault(version, []).append(record)
    return {version: sorted(records) for version, records in found.items()}


@pytest.fixture(scope="module")
def carrying(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has a checkpoint of every step, and steps that keep groups for the next one."""
    changes = {
        "run": {"steps": 30},
        "controller": {"config": {"prompts": 6, "surplus": "keep"}},
        "advantage": {"config": {"group_size": 2}},
        "filter": {"use": "core/varied"},
        "checkpoint": {"every": 1, "last": 100},
        "rewards": {"looks": {"use": "trouble/looks"}},
    }
    job = runs.job(**changes) | {
        "roles": {"policy": {"use": "trouble/told"}, "rollout": {"use": "trouble/pictures"}}
    }
    code, run = runs.finish(tmp_path_factory.mktemp("carrying"), job)
    assert code == 0, run.output
    return run


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_resumed_run_starts_with_the_carried_groups(
    shards: int, carrying: Any, tmp_path: Path
) -> None:
    """Each with its columns, its picture and its scores, whatever the number of controllers."""
    shutil.copytree(carrying.directory, tmp_path / "again")
    run = replace(carrying, directory=tmp_path / "again")
    calm, before = groups(run), stale(run)
    step = next(step for step in sorted(before) if step > 2 and len(before[step]) >= 8)
    for path in (run.path / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    (run.directory / "stale.jsonl").unlink()
    done = resume(run, f"controller.shards={shards}", f"run.steps={step + 3}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert stale(run)[step] == before[step], "the same groups, the same columns"
    manifest = json.loads(
        (run.path / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text()
    )
    assert {"surplus/headers.msgpack", "surplus/columns", "surplus/media"} <= manifest[
        "parts"
    ].keys()
    again = groups(run)
    for counts in again.values():
        dropped = sum(value for name, value in counts.items() if name.startswith("dropped/"))
        assert counts["issued"] == counts["kept"] + dropped + counts["surplus"]
    made = [again[at] for at in range(1, step + 4)]
    assert made[:step] == [calm[at] for at in range(1, step + 1)]
    position = json.loads((run.path / "position.json").read_text())
    assert position["next_ordinal"] == sum(counts["issued"] - counts["surplus"] for counts in made)


def test_a_resumed_run_keeps_what_the_balancer_learned(tmp_path: Path) -> None:
    job = runs.job(run={"steps": STEPS}, checkpoint={"every": 1}) | {
        "balance": {"use": "balance/cost"}
    }
    with runs.running(tmp_path, job) as run:
        run.read_until(f"step 3/{STEPS}")
        run.process.kill()
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    state = json.loads((run.path / "checkpoints" / f"step-{STEPS:06d}" / "state.json").read_text())
    weights = [0.95**age for age in range(STEPS)]  # of the measurements of one rank, step by step
    assert state["balance"]["balance/cost"]["count"] == pytest.approx(sum(weights))


OBSERVER = """
from gcore_core import hookimpl

@hookimpl
def gcore_run_start(run):
    write(f"start {run.resumed_from}")

@hookimpl
def gcore_step_end(run, report):
    write(f"{report.step} {'reward' in report.metrics:d}")

@hookimpl
def gcore_run_end(run, error):
    with open("ends.txt", "a") as file:
        file.write(f"{error!r}\\n")

def write(line):
    with open("observed.txt", "a") as file:
        file.write(line + "\\n")
"""


@pytest.mark.protects
def test_metrics_have_each_step_once_after_a_restart_and_after_a_resume(tmp_path: Path) -> None:
    """And each with its metrics; an observer is told no step again that stands, and one end."""
    (tmp_path / "observer.py").write_text(OBSERVER)
    steps = 30  # more than are made between what is read and a kill
    job = runs.job(run={"steps": steps}, checkpoint={"every": 2, "restarts": 1})
    job["local"] = [*job["local"], "observer.py"]
    with runs.running(tmp_path, job) as run:
        run.read_until(f" 4/{steps} ")
        os.kill(run.pids()["policy.0"], signal.SIGKILL)
        run.read_until("the run goes on from step")
        run.read_until(f"/{steps} ")
        run.process.kill()
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert all("reward" in row for row in rows[1:])
    starts = (run.directory / "observed.txt").read_text().split("start ")[1:]
    reported = [[int(line.split()[0]) for line in start.splitlines()] for start in starts]
    assert len(reported) == 3
    for resumed_from, *seen in reported:
        first = resumed_from + 1 if resumed_from else 0
        assert seen == list(range(first, first + len(seen)))
    assert [resumed_from > 0 for resumed_from, *_ in reported] == [False, True, True]
    assert reported[-1][-1] == steps
    assert " 0" not in "".join(start.partition("\n")[2] for start in starts[1:]), "no metrics"
    # It did not end when it went on by itself, and nobody could tell when it was killed.
    assert (run.directory / "ends.txt").read_text() == "''\n"


@pytest.mark.parametrize("every", [0, 4])
def test_a_run_that_goes_on_evaluates_the_steps_of_one_that_was_not_disturbed(
    every: int, tmp_path: Path
) -> None:
    """None is evaluated because the run goes on from it, and none twice."""
    steps = 12
    changes = {
        "run": {"steps": steps, "deterministic": True},
        "checkpoint": {"every": 2, "restarts": 1},
        "evaluation": {"every": every, "prompts": 4, "data": {"use": "fake"}},
    }
    job = runs.job(**changes)
    job["roles"]["rollout"] = {"use": "trouble/evaluated"}
    with runs.running(tmp_path, job) as run:
        run.read_until(f" 7/{steps} ")
        os.kill(run.pids()["policy.0"], signal.SIGKILL)
        found = run.read_until("the run goes on from step")
        assert run.wait() == 0, run.output
    first = int(found.split()[-1])
    evaluated = [int(row["step"]) for row in run.metrics() if row["evaluation"]]
    due = range(0, steps + 1, every or steps)
    assert evaluated == list(due)
    drawn = [int(line) for line in (tmp_path / "evaluated.txt").read_text().split()]
    again = [step for step in due if step > first and drawn.count(step) == 2]
    assert sorted(set(drawn)) == list(due)
    assert len(drawn) == len(due) + len(again), "one that was made before was made again"


def test_a_run_that_goes_on_says_which_file_beside_a_reward_has_changed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from helpers import length")
    (tmp_path / "helpers.py").write_text("def length(record): return len(record.text)")
    own = {"use": "core/function", "config": {"path": f"{tmp_path}/own.py", "name": "length"}}
    job = {**config(), "rewards": {"own": own}}
    with runs.running(tmp_path, job) as run:
        run.read_until(f"step 2/{STEPS}")
        run.process.kill()
    (tmp_path / "helpers.py").write_text("def length(record): return 1 + len(record.text)")
    done = resume(run)
    assert done.returncode == 0, done.stderr
    assert "the file of rewards.own.config.path/helpers.py is not what it was" in done.stdout


def test_a_scorer_that_starts_again_refuses_a_reward_that_was_changed_meanwhile(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text("from helpers import length")
    (tmp_path / "helpers.py").write_text("def length(record): return len(record.text)")
    own = {"use": "core/function", "config": {"path": f"{tmp_path}/own.py", "name": "length"}}
    job = {**config(), "rewards": {"own": own}}
    job["run"]["steps"] = 500
    with runs.running(tmp_path, job) as run:
        run.read_until(" 2/500 ")
        (tmp_path / "helpers.py").write_text("def length(record): return 7.0")
        scorer = next(pid for name, pid in run.pids().items() if name.startswith("scorer."))
        os.kill(scorer, signal.SIGKILL)
        assert run.wait() == 2, run.output
    assert f"{tmp_path}/helpers.py was changed while the run goes on." in run.output
    assert "rewards.own.config.path/helpers.py: " in run.output


@pytest.mark.protects
def test_a_run_does_not_go_on_with_another_model_at_the_same_path(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.safetensors").write_bytes(bytes(64))
    job = config()
    job["roles"]["policy"]["model"] = {"path": str(model)}
    with runs.running(tmp_path, job) as run:
        run.read_until(f"step 2/{STEPS}")
        run.process.kill()
    (model / "weights.safetensors").write_bytes(b"1" + bytes(63))
    done = resume(run)
    assert done.returncode == 2, done.stdout
    assert f"roles.policy.model.path: {model} is not what it was" in done.stderr
    (model / "weights.safetensors").write_bytes(bytes(64))
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_is_not_resumed_with_another_configuration(tmp_path: Path) -> None:
    run = killed_at(tmp_path, 2)
    done = resume(run, "run.seed=4")
    assert done.returncode == 2
    assert "run.seed: 3 was saved, 4 is asked for" in done.stderr


def test_a_run_does_not_go_on_by_itself_from_the_checkpoints_of_another_one(
    calm: Any, tmp_path: Path
) -> None:
    """As where its directory was emptied, and another run began there."""
    with runs.running(tmp_path, config()) as run:
        run.read_until(f"step 2/{STEPS}")
        shutil.copytree(calm.path / "checkpoints", run.path / "checkpoints", dirs_exist_ok=True)
        shutil.copy(calm.path / "checkpoint.key", run.path)
        os.kill(run.pids()["policy.0"], signal.SIGKILL)
        assert run.wait() == 8, run.output
    assert "the run goes on from step" not in run.output
    assert "the checkpoints here are those of another run." in run.output


def test_resuming_without_a_checkpoint_or_a_run_is_refused(tmp_path: Path) -> None:
    code, run = runs.finish(tmp_path, runs.job(run={"steps": 1}))
    assert code == 0
    done = resume(run)
    assert done.returncode == 8
    assert "there is no checkpoint that is whole" in done.stderr
    (run.path / "config.yaml").unlink()
    assert "this directory holds no run." in resume(run).stderr


@pytest.mark.protects
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    calm: Any, tmp_path: Path
) -> None:
    run = killed_at(tmp_path, 4)
    newest = sorted(
        path for path in (run.path / "checkpoints").glob("step-*") if path.name[-1].isdigit()
    )[-1]
    with next(newest.glob("policy/*")).open("r+b") as file:
        file.write(b"\xff" * 8)
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{newest.name} is refused" in done.stdout
    assert run.weights() == calm.weights()


def test_a_run_that_has_had_its_epochs_trains_on_none_again(tmp_path: Path) -> None:
    """64 rows, 6 prompts a step: half of them are consumed by the sixth step of a thousand."""
    more = {"steps": 1000, "epochs": 0.5, "deterministic": True}
    code, run = runs.finish(tmp_path, runs.job(run=more, checkpoint={"every": 1}))
    assert code == 0, run.output
    whole = run.weights()
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "step 6: the run makes no more steps, since its epochs of the data are over" in done.stdout
    )
    assert [row["step"] for row in run.metrics()][-1] == 6
    assert run.weights() == whole


def test_a_run_that_another_process_goes_on_with_is_refused_until_that_has_ended(
    calm: Any, tmp_path: Path
) -> None:
    """Also where that has not yet started a process by which it could be seen."""
    run = killed_at(tmp_path, 2)
    with hold_run(run.path):
        refused = resume(run)
    assert refused.returncode == 2
    assert f"process {os.getpid()} on " in refused.stderr, refused.stderr
    assert resume(run).returncode == 0
    assert run.weights() == calm.weights()


def test_nobody_takes_the_weights_of_an_earlier_end_for_those_of_a_run_that_went_on(
    tmp_path: Path,
) -> None:
    """They stay aside until the run ends well again, and then are its own again."""
    code, run = runs.finish(tmp_path, config())
    assert code == 0, run.output
    first = run.weights()
    with resumed(run, "run.steps=1000") as process:
        assert process.stdout is not None
        while not re.search("^step +9/", process.stdout.readline()):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(runs.PATIENCE_S) == 143
    with pytest.raises(DataError, match="has gone on since it ended; .* in earlier/weights"):
        export(run.path, tmp_path / "out")
    assert not Run(run.path).summary.count("weights_sha256")
    with pytest.raises(DataError, match="no final weights"):
        _ = Run(run.path).weights
    assert (run.path / "earlier" / "weights").is_dir()
    done = resume(run, "run.steps=12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.weights() != first
    assert not (run.path / "earlier").exists()


def test_the_checkpoint_of_the_last_step_has_what_the_step_is_measured_by(tmp_path: Path) -> None:
    """Else it is never the best one, and is removed when the run goes on."""
    evaluation = {"every": 3, "prompts": 4, "data": {"use": "fake"}}
    job = runs.job(run={"steps": 3}, checkpoint={"every": 1, "last": 1}, evaluation=evaluation)
    code, run = runs.finish(tmp_path, job)
    assert code == 0, run.output
    manifest, _ = inspect(run.path / "checkpoints" / "step-000003")
    last = run.metrics()[-1]
    assert last["evaluation"]
    assert manifest is not None
    assert manifest.metrics.keys() >= {*last["evaluation"], "reward"}


def test_a_run_that_has_more_steps_than_it_is_to_make_says_so(tmp_path: Path) -> None:
    code, run = runs.finish(tmp_path, runs.job(run={"steps": 3}, checkpoint={"every": 1}))
    assert code == 0, run.output
    whole = run.weights()
    done = resume(run, "run.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3: the run makes no more steps, since run.steps is 2" in done.stdout
    assert run.weights() == whole
