"""Runs of the calculator's job with torch's engine, started as a person starts them.

A deterministic one has the same weights whatever must leave no trace: the number of shards, of
processes for environments, how long environments take, and a process of theirs that is killed in
the middle. And environments that hang, fail or die cost their own groups and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from gcore_core.contract.order import sample_seed
from gcore_core.contract.run_files import RecordTrace, read_metrics, read_trace
from gcore_core.run.saved_weights import weights_sha256

pytest.importorskip("gcore_torch")
pytest.importorskip("gcore_algorithms")
ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
STEPS = 3
PATIENCE_S = 300.0
#: The calculator, which leaves the number of its process, and may sleep, fail, hang or die.
#: faults: seed of a sample -> what it does in its first step.
CALCULATOR = f"""
import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, {str(RECIPES / "calculator")!r})
from calculator import Calculator

print("a print at import is no message")


class Watched(Calculator):
    def __init__(self, sleeps=0.0, dies=False, faults={{}}):
        self._sleeps, self._dies, self._faults = sleeps, dies, faults

    async def reset(self, row, seed):
        self._fault = self._faults.get(f"s{{seed}}", "")
        return await super().reset(row, seed)

    async def step(self, reply):
        with open("pids", "a") as file:
            print(os.getpid(), file=file)
        if self._dies and not Path("died").exists() and len(Path("pids").read_text()) > 600:
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault:
            Path("met." + self._fault).touch()
        if self._fault == "loops":
            while True:
                time.sleep(0.01)
        if self._fault == "awaits":
            await asyncio.Event().wait()
        if self._fault == "raises":
            raise RuntimeError("no more paper")
        if self._fault == "prints":
            print('{{"id": [0, 0], "turn": 1, "done": true}}')
        await asyncio.sleep(self._sleeps * random.SystemRandom().random())
        return await super().step(reply)
"""


def run(directory: Path, *overrides: str, deterministic: bool) -> Path:
    """Runs the job for a few steps, and returns the run's directory; no process is left.

    Its model is taught for a moment only.
    """
    directory.mkdir()
    (directory / "watched.py").write_text(CALCULATOR)
    job = yaml.safe_load((RECIPES / "calculator.yaml").read_text())
    job["run"] |= {"steps": STEPS, "dir": "run", "deterministic": deterministic}
    job["controller"]["config"] |= {"prompts": 8}
    job["evaluation"] |= {"every": 0, "prompts": 16}
    job["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 150}
    job["environment"]["config"]["environment"] = "watched.py:Watched"
    del job["plugins"]
    text = yaml.safe_dump(job)
    for folder in ("quickstart", "calculator"):
        text = re.sub(rf" {folder}/", f" {RECIPES}/{folder}/", text)
    (directory / "job.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", "run", "job.yaml", *overrides],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(directory.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert pids(directory), "nothing was played"
    assert not still_alive(directory), "a process of environments is left"
    return directory / "run"


def weights_of(directory: Path, *overrides: str) -> str:
    """Returns the hash of a deterministic run's weights."""
    return weights_sha256(run(directory, *overrides, deterministic=True) / "weights")


def pids(directory: Path) -> set[int]:
    """Returns the processes in which environments ran."""
    found = [file for file in directory.rglob("pids") if file.is_file()]
    return {int(line) for file in found for line in file.read_text().split()}


def still_alive(directory: Path) -> set[int]:
    """Returns which of these are left when they have had time to end."""
    until_s = time.monotonic() + 10
    while (left := set(filter(_runs, pids(directory)))) and time.monotonic() < until_s:
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where runs lie, and the weights of one with two shards and one process of environments."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, weights_of(folder / "plain")


CHANGES: dict[str, tuple[str, ...]] = {
    "one shard": ("controller.shards=1",),
    "three hosts": ("environment.config.hosts=3",),
    "sleeps at random": ("environment.config.config.sleeps=0.02",),
    "a host is killed": ("environment.config.config.dies=true",),
}


@pytest.mark.rest
@pytest.mark.parametrize("change", CHANGES)
def test_weights_do_not_depend_on(plain: tuple[Path, str], change: str) -> None:
    folder, weights = plain
    directory = folder / change.replace(" ", "_")
    assert weights_of(directory, *CHANGES[change]) == weights
    if change == "three hosts":
        assert len(pids(directory)) == 3
    if change == "a host is killed":
        assert list(directory.rglob("died")) and len(pids(directory)) == 2


@pytest.mark.rest
def test_weights_depend_on_the_seed(plain: tuple[Path, str]) -> None:
    folder, weights = plain
    assert weights_of(folder / "seed", "run.seed=8") != weights


@pytest.mark.rest
def test_only_groups_with_a_guilty_episode_are_lost(tmp_path: Path) -> None:
    """One loops for ever, one awaits for ever, one raises, one prints what looks like a message."""
    faults = {3: "loops", 9: "awaits", 12: "raises", 15: "prints"}
    seeds = {f"s{sample_seed(7, ordinal, 0, 2)}": fault for ordinal, fault in faults.items()}
    ran = run(
        tmp_path / "faults",
        f"environment.config.config.faults={json.dumps(seeds)}",
        "environment.config.turn_s=2",
        deterministic=False,
    )
    directory = tmp_path / "faults"
    assert {mark.suffix[1:] for mark in directory.rglob("met.*")} == set(faults.values())
    records = [line for line in read_trace(ran) if isinstance(line, RecordTrace)]
    lost = {one.ordinal for one in records if one.verdict == "quarantined"}
    assert lost == {3, 9, 12}
    reasons = {one.ordinal: one.reason for one in records if one.status == "failed"}
    assert {ordinal: reason.partition(":")[0] for ordinal, reason in reasons.items()} == {
        3: "environment_hung",
        9: "environment_hung",
        12: "environment_error",
    }
    steps = [row["metrics"] for row in read_metrics(ran)[1:]]
    assert len(steps) == STEPS
    assert len(pids(directory)) == 2, "the one who loops took its process with it, and no other"
