"""A whole run: the torch trainer teaches, SGLang samples, and both agree after every push."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
STEPS = 4


def test_trainer_and_generator_agree_after_every_push_of_a_run(tmp_path: Path) -> None:
    overrides = [
        "plugins=[]",
        f"run.dir={tmp_path / 'run'}",
        f"run.steps={STEPS}",
        "roles.policy.model.make.config={seed: 0, steps: 40}",
        "roles.rollout.use=sglang",
        "roles.rollout.follows=policy",
        "evaluation.prompts=32",
        "evaluation.every=0",
    ]
    command = [sys.executable, "-m", "gcore_core", "run", str(QUICKSTART), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["metrics"]["logprob_gap_max"] for line in lines if line["step"] > 0]
    assert len(gaps) == STEPS
    # float32 on a CPU; a push that is not taken shows as 1e-2 and more
    assert max(gaps) < 1e-4
    assert [line["version"] for line in lines] == list(range(STEPS + 1))
