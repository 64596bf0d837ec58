"""Jobs that a real slurm runs on two machines, by the script that ``g-core nodes slurm`` writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcore_core.contract import run_files
from tests.integration.test_nodes import RECIPE, hash_of, left_on, run_words, wait_until
from tests.support.machines import Machine, machines
from tests.support.slurm import Slurm, slurm

pytestmark = pytest.mark.slow
SHORT = ("evaluation.every=0", "controller.config.prompts=8", "plugins=[]")
LONG_S = 600.0  # for what takes long only on a machine that is busy
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    with machines(2) as (first, second):
        yield first, second


@pytest.fixture
def cluster(two: tuple[Machine, Machine]) -> Iterator[Slurm]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as directory,
        slurm(two, Path(directory)) as cluster,
    ):
        yield cluster


def written(directory: Path, *words: str) -> Path:
    """Has g-core write the script of a job with two nodes."""
    script = directory / "job.sbatch"
    command = [sys.executable, "-m", "gcore_core", "nodes", "slurm", str(RECIPE), *words]
    subprocess.run(
        [*command, "--nodes=2", "--cpus-per-task=2", "--out=job.sbatch"],
        cwd=directory,
        env=ENVIRONMENT,
        check=True,
    )
    return script


def output(directory: Path, job: str) -> str:
    file = directory / f"quickstart-{job}.log"
    return file.read_text() if file.exists() else ""


def has_trained(directory: Path, job: str) -> bool:
    return "  reward " in output(directory, job)


def left(two: tuple[Machine, Machine]) -> list[str]:
    """Returns what a job has left on the machines: processes and shared memory."""
    lines = [line for machine in two for line in left_on(machine)]
    own = ("slurmctld", "slurmscriptd", "slurmd ")
    return [line for line in lines if not any(name in line for name in own)]


def test_the_quickstart_learns_the_same_in_a_job(
    two: tuple[Machine, Machine], cluster: Slurm, tmp_path: Path
) -> None:
    """It ends with 0 and leaves nothing, and its weights are those of one machine bit for bit."""
    placed = ("placement.use=placement/split", "run.deterministic=true")
    words = ("run.steps=2", *SHORT, *placed, "launcher.config.devices=1")
    job = cluster.submit(written(tmp_path, *words))
    facts = cluster.wait(job)
    told = output(tmp_path, job)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), told
    assert "node2 has joined 10.77.0.1:29399" in told
    logs = tmp_path / "runs" / f"quickstart-{job}" / "logs"
    assert "policy.0 is started" in (logs / "agent.0.log").read_text()
    assert "rollout.0 is started" in (logs / "agent.1.log").read_text()
    wait_until(lambda: not left(two), LONG_S)
    assert list((tmp_path / "runs").iterdir()) == [logs.parent], "the token is still there"
    alone = subprocess.run(
        run_words("evaluation.every=0", "cluster.devices=2"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert hash_of(told) == hash_of(alone.stdout)


def test_a_job_is_queued_again_before_its_time_is_up_and_goes_on(
    two: tuple[Machine, Machine], cluster: Slurm, tmp_path: Path
) -> None:
    """It is slurm that signals it. In the end it is cancelled, and leaves nothing."""
    words = ("run.steps=100000", *SHORT, "launcher.config.devices=1")
    job = cluster.submit(written(tmp_path, *words, "--time=60", "--save-within=60"))
    wait_until(lambda: has_trained(tmp_path, job), LONG_S)
    # From now on it has two minutes, or up to one more: slurm counts whole ones.
    hours, minutes, _ = cluster.facts(job)["RunTime"].split(":")
    limit_min = 60 * int(hours) + int(minutes) + 3
    cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={limit_min}")
    wait_until(lambda: cluster.facts(job)["Restarts"] == "1", LONG_S)
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    told = output(tmp_path, job)
    saved = re.search(r"go on from step (\d+) with: g-core resume", told)
    assert saved, told
    wait_until(lambda: "  reward " in output(tmp_path, job)[len(told) :], LONG_S)
    run = tmp_path / "runs" / f"quickstart-{job}"
    steps = [report["step"] for report in run_files.read_metrics(run)]
    assert steps == list(range(steps[0], steps[0] + len(steps))), (
        "a step is missing, or there twice"
    )
    assert steps[-1] > int(saved.group(1))
    cluster.call("scancel", job)
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    wait_until(lambda: not left(two), LONG_S)


def test_a_job_whose_script_is_told_to_end_saves_and_is_not_queued_again(
    two: tuple[Machine, Machine], cluster: Slurm, tmp_path: Path
) -> None:
    words = ("run.steps=100000", *SHORT, "launcher.config.devices=1")
    job = cluster.submit(written(tmp_path, *words))
    wait_until(lambda: has_trained(tmp_path, job), LONG_S)
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    facts = cluster.wait(job)
    told = output(tmp_path, job)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "143:0", "0")
    assert re.search(r"go on from step \d+ with: g-core resume", told), told
    wait_until(lambda: not left(two), LONG_S)
