"""Whole runs in which another role of the run speaks for a player, with torch's engines.

The policy and an opponent add the same digits; the opponent gets no weights. A deterministic run
has the same weights whatever must leave no trace: the number of shards, and of the opponent's
replicas, one of which is killed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcore_core.contract.run_files import read_metrics
from gcore_core.run.saved_weights import weights_sha256

pytest.importorskip("gcore_torch")
pytest.importorskip("gcore_algorithms")
ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
STEPS = 2
PATIENCE_S = 300.0
#: Both answer the same problem, the policy first. Who is asked writes down what was said.
DUEL = """
import json
from gcore_environments import Observation


class Duel:
    async def reset(self, row, seed):
        self._row, self._seed = row, seed
        return self._asks("me")

    async def step(self, reply):
        if reply.player == "me":
            self._mine = reply.text
            return self._asks("you")
        with open("duels.jsonl", "a") as file:
            print(json.dumps([self._seed, self._mine, reply.text, reply.status]), file=file)
        right = {"me/right": self._mine, "you/right": reply.text}
        answer = self._row["answer"]
        return Observation(
            rewards={name: float(text[-2:] == answer) for name, text in right.items()}, done=True
        )

    def _asks(self, player):
        messages = [{"role": "user", "content": self._row["prompt"]}]
        return Observation(messages=messages, player=player)

    async def close(self):
        pass
"""
#: A generator whose first process ends in the middle of its work.
MORTAL = """
import os
import signal
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract.providers import GeneratorProvider
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.generator import TorchGenerator

DIED = Path(__file__).parent / "died"


class Mortal(TorchGenerator):
    def step(self):
        ended = super().step()
        if ended and not DIED.exists():
            DIED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return ended


@hookimpl
def gcore_generators():
    yield GeneratorProvider(
        summary="dies once", factory=f"{__name__}:Mortal", config=TorchGeneratorConfig
    )
"""


def job_of(directory: Path, *, deterministic: bool) -> dict[str, Any]:
    """Returns the job, whose models are taught for a moment only."""
    job: dict[str, Any] = yaml.safe_load((RECIPES / "calculator.yaml").read_text())
    job["run"] |= {"steps": STEPS, "dir": "run", "deterministic": deterministic}
    job["controller"]["config"] |= {"prompts": 4}
    job["evaluation"] = {"every": 0}
    model = job["roles"]["policy"]["model"]
    model["make"]["config"] = {"seed": 0, "steps": 60}
    job["roles"]["opponent"] = {
        "use": "torch",
        "model": model,
        "config": {"max_new_tokens": 14, "temperature": 1.0},
    }
    job["environment"] |= {"roles": {"you": "opponent"}}
    job["environment"]["config"] = {"environment": "duel.py:Duel", "turn_tokens": 14}
    job["rewards"] = {"right": {"use": "environments", "config": {"name": "me/right"}}}
    del job["plugins"]
    return job


def run(directory: Path, job: dict[str, Any], *overrides: str) -> Path:
    """Runs a job, and returns the run's directory."""
    directory.mkdir(exist_ok=True)
    (directory / "duel.py").write_text(DUEL)
    (directory / "mortal.py").write_text(MORTAL)
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
    return directory / "run"


def duels(directory: Path) -> list[list[Any]]:
    """Returns what was said in each game: seed, the policy, the opponent, its status; sorted."""
    found = [file for file in directory.rglob("duels.jsonl") if file.is_file()]
    return sorted(json.loads(line) for file in found for line in file.read_text().splitlines())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[list[Any]]]:
    """Where runs lie; the weights of one with two shards; and what was said in it."""
    folder = tmp_path_factory.mktemp("runs")
    job = job_of(folder / "plain", deterministic=True)
    weights = weights_sha256(run(folder / "plain", job) / "weights")
    return folder, weights, duels(folder / "plain")


@pytest.mark.rest
def test_the_opponent_speaks_in_each_game(
    plain: tuple[Path, str, list[list[Any]]],
) -> None:
    _, _, said = plain
    assert len(said) == STEPS * 4 * 8
    assert {status for *_, status in said} == {"finished"}
    assert len({theirs for _, _, theirs, _ in said}) > 4, "it says one thing only"
    assert any(mine != theirs for _, mine, theirs, _ in said)


CHANGES: dict[str, tuple[str, ...]] = {
    "one shard": ("controller.shards=1",),
    "two replicas of the opponent": ("roles.opponent.slots=2", "cluster.devices=2"),
    "the opponent is killed": ("roles.opponent.use=mortal", "local=[mortal.py]"),
}


@pytest.mark.rest
@pytest.mark.parametrize("change", CHANGES)
def test_weights_do_not_depend_on(plain: tuple[Path, str, list[list[Any]]], change: str) -> None:
    folder, weights, said = plain
    directory = folder / change.replace(" ", "_")
    job = job_of(directory, deterministic=True)
    assert weights_sha256(run(directory, job, *CHANGES[change]) / "weights") == weights
    assert duels(directory) == said
    assert (directory / "died").exists() == ("killed" in change)


@pytest.mark.rest
def test_a_run_in_one_process_plays_against_a_role(tmp_path: Path) -> None:
    """All roles share one event loop there, in which nobody may wait for an answer."""
    job = job_of(tmp_path / "inline", deterministic=False)
    job["launcher"] = {"use": "core/inline"}
    ran = run(tmp_path / "inline", job, "controller.shards=1")
    assert len(read_metrics(ran)) == 1 + STEPS
    assert len(duels(tmp_path / "inline")) >= STEPS * 4 * 8
