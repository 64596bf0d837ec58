"""The quickstart's task learned by PPO with a critic on the policy's own trunk, in real
processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from gcore_testing.runs import run_recipe
from safetensors.numpy import load_file

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
STEPS = 40


@pytest.mark.slow
def test_a_policy_with_a_value_head_learns_the_quickstart(tmp_path: Path) -> None:
    """The reward rises as with a critic of its own, and values come to explain returns."""
    settings = [
        f"run.steps={STEPS}",
        "advantage={use: algorithms/gae, config: {whiten: true}}",
        "roles.policy.config.value_head.coefficient=0.5",
        "evaluation.every=0",
        "evaluation.prompts=32",
    ]
    outcome = run_recipe(QUICKSTART, tmp_path, settings, 500)
    assert outcome.versions == list(range(STEPS + 1))
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row["metrics"] for row in map(json.loads, lines) if row["step"]]
    rewards = [row["reward"] for row in rows]
    explained = [row["explained_variance"] for row in rows]
    print([round(value, 3) for value in rewards], [round(value, 3) for value in explained])
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2
    assert fmean(explained[-8:]) > 0.2, "of returns the values say less than a constant at first"
    names = load_file(tmp_path / "weights" / "model.safetensors").keys()
    assert "score.weight" not in names and len(names) > 1
