"""A whole run of the quickstart with a critic on some engine, in real processes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from gcore_language.models import load_reward_model
from gcore_testing.runs import run_recipe

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
_STEPS = 4


def assert_a_critic_trains(directory: Path, use: str, overrides: Sequence[str]) -> None:
    """Policy and critic on the engine ``use``, two slots each; the critic's new head learns.

    overrides: further settings of the run.
    """
    settings = [
        "plugins=[critic]",
        "cluster.devices=5",
        f"run.steps={_STEPS}",
        "roles.policy.model.make.config={seed: 0, steps: 40}",
        f"roles.policy.use={use}",
        "roles.policy.slots=2",
        "advantage={use: algorithms/gae, config: {whiten: true}}",
        f"roles.critic={{use: {use}, slots: 2, minibatches: 4}}",
        "roles.critic.config={learning_rate: 2e-3}",
        "evaluation.prompts=32",
        "evaluation.every=0",
        *overrides,
    ]
    outcome = run_recipe(QUICKSTART, directory, settings, 400)
    assert outcome.versions == list(range(_STEPS + 1))
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row["metrics"] for row in map(json.loads, lines) if row["step"]]
    for row in rows:
        assert math.isfinite(row["critic/value_loss"] + row["critic/explained_variance"])
    path = str(directory / "weights-critic")
    head = load_reward_model(path, dtype="float32").score.weight
    assert float(head.detach().abs().min()) > 0, "a new head begins with zeros"
