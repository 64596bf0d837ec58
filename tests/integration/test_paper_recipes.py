"""The papers' recipes in the README of gcore-algorithms train a small model."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
STEPS = 3
LONGEST = 14


def recipe(name: str) -> dict[str, Any]:
    """The YAML block below the line "- <name>:" of the README."""
    page = (ROOT / "plugins/gcore-algorithms/README.md").read_text()
    match = re.search(rf"^- {name}:\n\n```yaml\n(.*?)^```$", page, flags=re.M | re.S)
    assert match is not None
    return dict(yaml.safe_load(match[1]))


def test_the_recipe_of_dapo_trains_a_small_model(tmp_path: Path) -> None:
    """It is as the README has it, but for lengths: the small model's answers are short."""
    for module in ("gcore_torch", "gcore_algorithms", "transformers"):
        pytest.importorskip(module)
    job = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
    exact = job["rewards"]["exact"]
    job |= recipe("DAPO")
    job["rewards"]["exact"]["config"] = exact["config"]
    job["rewards"]["overlong"]["config"] = {"max_actions": LONGEST, "soft_actions": 10}
    job["run"] |= {"steps": STEPS, "dir": str(tmp_path / "run")}
    job["launcher"] = {"use": "core/inline"}
    job["controller"] |= {"shards": 1}
    job["controller"]["config"]["prompts"] = 8
    job["evaluation"]["every"] = 0
    job["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 40}
    assert job["roles"]["rollout"]["config"]["max_new_tokens"] == LONGEST
    del job["plugins"]
    text = yaml.safe_dump(job).replace("quickstart/", f"{RECIPES}/quickstart/")
    (tmp_path / "job.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", "run", "job.yaml"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300.0,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["metrics"] for line in lines[1:]]
    assert len(steps) == STEPS
    for metrics in steps:
        assert metrics["groups/trained"] == 8
        assert math.isfinite(metrics["loss"])
        assert metrics["grad_norm"] > 0
        assert metrics["log_ratio_clamped"] == 0
        assert -1 <= metrics["reward/overlong"] < 0
        assert metrics["reward"] == pytest.approx(
            2 * metrics["reward/exact"] + metrics["reward/overlong"]
        )
