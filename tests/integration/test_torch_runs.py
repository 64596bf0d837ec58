"""Real runs on the torch backend: what must not depend on the number of shards, on the launcher, on
ranks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 3
#: By how much the weights of runs with other seeds differ, at least.
MOVED = 1e-4


@dataclass(frozen=True)
class Ran:
    """What a run left behind. texts: evaluated answers, greedy and sampled, by step; tensors: the
    final weights.

    pids: process ids as the node agent wrote them down.
    """

    metrics: list[dict[str, float]]
    texts: list[list[tuple[str, str, str]]]
    tensors: dict[str, np.ndarray]
    pids: dict[str, int]

    def of(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics if name in row]


def run(directory: Path, *overrides: str, timeout_s: float = 300.0) -> Ran:
    """The quickstart's job with a model taught for a moment only, shortened; its own process, as a
    user starts it.
    """
    directory.mkdir(parents=True)
    job = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    job["run"] |= {"steps": STEPS, "dir": str(directory / "run"), "deterministic": True}
    job["evaluation"] |= {"every": 0, "prompts": 16, "show": 16}
    job["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 40}
    del job["plugins"]
    text = yaml.safe_dump(job).replace("quickstart/", f"{RECIPES}/quickstart/")
    (directory / "job.yaml").write_text(text)
    command = [sys.executable, "-m", "gcore_core", "run", "job.yaml", *overrides]
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(directory.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return read(directory / "run")


def read(ran: Path) -> Ran:
    from safetensors.numpy import load_file

    rows = [json.loads(line) for line in (ran / "metrics.jsonl").read_text().splitlines()]
    samples = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((ran / "samples").iterdir())
    ]
    agent = ran / "logs" / "agent.0.log"  # there is none inline
    started = (
        re.findall(r"INFO (\S+) is started, pid (\d+)", agent.read_text()) if agent.exists() else []
    )
    return Ran(
        metrics=[row["metrics"] for row in rows],
        texts=[[(row["mode"], row["prompt"], row["text"]) for row in part] for part in samples],
        tensors=load_file(ran / "weights" / "model.safetensors"),
        pids={name: int(pid) for name, pid in started},
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    base = tmp_path_factory.mktemp("torch_runs")
    return base, run(base / "one", "controller.shards=1")


def assert_same_run(found: Ran, expected: Ran) -> None:
    """The same bits of weights, metrics and texts; rollout and trainer agree to the last bit."""
    for name in ("loss", "grad_norm", "reward", "reward/worked", "length", "entropy", "kl"):
        assert found.of(name) == expected.of(name), name
    assert found.of("logprob_gap_max") == [0.0] * STEPS
    assert len(expected.of("grad_norm")) == STEPS
    assert found.texts == expected.texts
    assert max(map(len, expected.texts)) == 32, "16 greedy and 16 sampled answers"
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], tensor, err_msg=name)


@pytest.mark.protects
@pytest.mark.parametrize(
    "overrides",
    [
        ("controller.shards=2",),
        ("controller.shards=4",),
        ("launcher.use=core/inline", "controller.shards=2"),
    ],
    ids=["two shards", "four shards", "inline"],
)
def test_a_deterministic_run_does_not_depend_on_shards_or_launcher(
    one: tuple[Path, Ran], overrides: tuple[str, ...]
) -> None:
    base, expected = one
    found = run(base / "-".join(overrides).replace("/", "_"), *overrides)
    assert_same_run(found, expected)
    if overrides == ("controller.shards=4",):
        controllers = {pid for name, pid in found.pids.items() if name.startswith("controller.")}
        assert len(controllers) == 4, "four controllers are four processes"


def test_sharded_ranks_and_replicas_leave_no_trace(one: tuple[Path, Ran]) -> None:
    base, expected = one
    layout = ("roles.policy.slots=2", "roles.rollout.slots=2", "cluster.devices=4")
    assert_same_run(run(base / "ranks", "controller.shards=2", *layout), expected)


def test_another_seed_is_another_run(one: tuple[Path, Ran]) -> None:
    """Guards the comparisons above: they would hold of anything if the weights did not move or
    ignored the seed.
    """
    base, expected = one
    other = run(base / "seed", "controller.shards=1", "run.seed=8")
    assert other.of("grad_norm") != pytest.approx(expected.of("grad_norm"), rel=1e-3)
    moved = [
        np.abs(other.tensors[name] - tensor).max() for name, tensor in expected.tensors.items()
    ]
    assert max(moved) > MOVED


@pytest.mark.slow
@pytest.mark.parametrize(
    "advantage",
    ["algorithms/grpo", "algorithms/rloo", "algorithms/reinforce-pp"],
    ids=lambda use: use.split("/")[1],
)
def test_the_quickstart_learns_with_advantage(advantage: str, tmp_path: Path) -> None:
    job: dict[str, Any] = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    job["advantage"] = {"use": advantage, "config": {"group_size": 8}}
    job["run"]["dir"] = str(tmp_path / "run")
    job["evaluation"]["every"] = 0
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump(job).replace("quickstart/", f"{RECIPES}/quickstart/")
    )
    command = [sys.executable, "-m", "gcore_core", "run", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    before, after = rows[0]["evaluation"], rows[-1]["evaluation"]
    assert before["greedy/exact"] < 0.45
    assert after["greedy/exact"] >= 0.9
    assert after["sampled/worked"] >= 0.8
