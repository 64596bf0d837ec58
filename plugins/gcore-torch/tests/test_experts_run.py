"""A run of a tiny mixture of experts in real processes, and what its check refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language.tiny import save_model

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.run_files import read_metrics

REWARD = '''
"""The share of an answer that is sevens."""


def sevens(record):
    return record.text.count("7") / 8
'''


def write_job(directory: Path, family: str, steps: int, **rollout: Any) -> Path:
    """Writes a job of two controllers whose reward a random model learns fast; returns its file."""
    save_model(directory / "model", family)
    (directory / "sevens.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"{row}+{row % 7}="}) for row in range(64)]
    (directory / "rows.jsonl").write_text("\n".join(rows))
    job: dict[str, Any] = {
        "run": {"name": "experts", "steps": steps, "dir": str(directory / "run")},
        "controller": {"shards": 2, "config": {"prompts": 8}},
        "data": {"use": "core/jsonl", "config": {"path": "rows.jsonl", "index_dir": "index"}},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": 8}},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": {
            "policy": {
                "use": "torch",
                "model": {"path": str(directory / "model")},
                "config": {
                    "learning_rate": 3e-3,
                    "router_replay": "always",
                    "router_aux_loss": 0.01,
                },
            },
            "rollout": {"use": "torch", "config": {"max_new_tokens": 8, **rollout}},
        },
        "rewards": {
            "sevens": {"use": "core/function", "config": {"path": "sevens.py", "name": "sevens"}}
        },
        "plugins": [],
    }
    file = directory / "job.yaml"
    file.write_text(json.dumps(job))
    return file


def run_job(directory: Path, *overrides: str) -> list[dict[str, float]]:
    """Runs the job of ``write_job``; returns the metrics of its steps."""
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", "run", "job.yaml", *overrides],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [row["metrics"] for row in read_metrics(directory / "run") if "loss" in row["metrics"]]


@pytest.mark.slow
def test_a_mixture_of_experts_learns_with_replayed_routers(tmp_path: Path) -> None:
    steps = 25
    write_job(tmp_path, "qwen3_moe", steps)
    rows = run_job(tmp_path)
    assert len(rows) == steps
    rewards = [row["reward"] for row in rows]
    # a random model writes one seven in some twenty characters
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    for row in rows:
        assert row["logprob_gap_max"] < 1e-4
        assert row["router_differ_share"] < 0.01
        assert 1 / 8 <= row["router_busiest_share"] <= 1
        assert row["router_aux_loss"] > 0


@pytest.mark.slow
def test_slots_that_share_experts_agree_with_the_generator_after_every_push(tmp_path: Path) -> None:
    write_job(tmp_path, "mixtral", 3)
    layout = ("roles.policy.slots=2", "roles.policy.config.sharding.experts=2")
    rows = run_job(tmp_path, *layout, "cluster.devices=3")
    assert len(rows) == 3
    for row in rows:  # a push that was not taken shows as 1e-2
        assert row["logprob_gap_max"] < 1e-4


def test_a_rollout_that_says_nothing_of_experts_is_refused_where_they_are_replayed(
    tmp_path: Path,
) -> None:
    file = write_job(tmp_path, "mixtral", 1, routing="never")
    with pytest.raises(ConfigError) as caught:
        load_plan(file, [])
    assert str(caught.value) == (
        "roles.rollout.use: torch does not say under these settings which experts computed a "
        "token, and torch, which roles.policy uses, is to replay them; take a generator with the "
        "trait routing, such as torch, or settings that have it, or set roles.policy.config not to "
        "need them."
    )


def test_a_generator_without_the_trait_is_refused_where_experts_are_replayed(
    tmp_path: Path,
) -> None:
    (tmp_path / "plain.py").write_text(
        "from gcore_core import hookimpl\n"
        "from gcore_core.contract import providers as p\n\n\n"
        "@hookimpl\n"
        "def gcore_generators():\n"
        "    yield p.GeneratorProvider(summary='-', factory='m:f')\n"
    )
    file = write_job(tmp_path, "mixtral", 1)
    job = json.loads(file.read_text())
    job["roles"]["rollout"] = {"use": "plain"}
    file.write_text(json.dumps({**job, "local": ["plain.py"]}))
    with pytest.raises(ConfigError, match="take a generator with the trait routing"):
        load_plan(file, [])
    load_plan(file, ["roles.policy.config.router_replay=auto"])
