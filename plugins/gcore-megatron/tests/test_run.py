"""A whole run: two tensor-parallel slots teach, torch samples, and both agree after every push."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
STEPS = 3


def test_trainer_and_generator_agree_after_every_push_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("gcore_torch")
    overrides = [
        "plugins=[]",
        f"run.dir={tmp_path / 'run'}",
        f"run.steps={STEPS}",
        "roles.policy.use=megatron",
        "roles.policy.slots=2",
        "roles.policy.config.tensor_parallel=2",
        "roles.policy.model.make.config={seed: 0, steps: 40}",
        "evaluation.prompts=32",
        "evaluation.every=0",
    ]
    command = [sys.executable, "-m", "gcore_core", "run", str(QUICKSTART), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["metrics"]["logprob_gap_max"] for line in lines if line["step"] > 0]
    assert len(gaps) == STEPS
    # float32 on a CPU. A push that is not taken shows as 1e-2 and more.
    assert max(gaps) < 1e-4
    assert [line["version"] for line in lines] == list(range(STEPS + 1))
