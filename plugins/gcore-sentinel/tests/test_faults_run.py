"""Whole runs in bfloat16 with one planted fault: it is told as what it is, and the run is saved.

The recipe is the quickstart, in processes of its own, with two replicas.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import gcore_sentinel
import pytest

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
TABLE = Path(gcore_sentinel.__file__).parent / "tables" / "torch-torch-bfloat16-quickstart.json"
STEPS = 16


def run(tmp_path: Path, fault: str, replica: int) -> subprocess.CompletedProcess[str]:
    """Runs the quickstart with a faulty generator, under the table of torch with torch."""
    table = json.loads(TABLE.read_text())
    table["pair"]["generator"] = "faulty"
    (tmp_path / "table.json").write_text(json.dumps(table))
    overrides = [
        f"local=[{Path(__file__).parent / 'faulty.py'}]",
        f"run.dir={tmp_path / 'run'}",
        f"run.steps={STEPS}",
        "evaluation.every=0",
        "evaluation.prompts=8",
        "checkpoint.every=2",
        "checkpoint.restarts=0",
        "roles.rollout.use=faulty",
        "roles.rollout.slots=2",
        f"roles.rollout.config.fault={fault}",
        f"roles.rollout.config.replica={replica}",
        "roles.rollout.config.dtype=bfloat16",
        "roles.policy.config.dtype=bfloat16",
        f"sentinel.config.table={tmp_path / 'table.json'}",
    ]
    command = [sys.executable, "-m", "gcore_core", "run", str(RECIPE), *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "replica", "named", "cause"),
    [
        ("old", 1, r"rollout\.1 and the trainer", r"old weights"),
        ("zeroed", 0, r"rollout\.0 and the trainer", r"1 of 21 tensors: .*down_proj"),
        ("temperature", -1, r"rollout\.", r"samples at 0\.9\d* times the temperature"),
        ("shifted", 1, r"rollout\.1 and the trainer", r"shifted by one"),
        ("masked", 1, r"rollout\.1 and the trainer", r"last action of each .* is masked"),
    ],
)
def test_a_fault_in_a_run_is_told_as_what_it_is_and_the_run_is_saved(
    tmp_path: Path, fault: str, replica: int, named: str, cause: str
) -> None:
    done = run(tmp_path, fault, replica)
    said = done.stdout + done.stderr
    assert done.returncode == 6, said[-3000:]
    assert re.search(named, said) and re.search(cause, said), said[-3000:]
    stopped = re.search(r"step (\d+): rollout|step (\d+): the generators", said)
    assert stopped is not None, said[-3000:]
    step = int(stopped[1] or stopped[2])
    folder = tmp_path / "run" / "checkpoints"
    saved = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
    assert step < 2 or max(saved, default=0) >= step - 2, (step, saved)


@pytest.mark.slow
def test_a_healthy_run_in_bfloat16_goes_to_its_end(tmp_path: Path) -> None:
    done = run(tmp_path, "", -1)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    levels = [row["metrics"]["sentinel/log_e"] for row in rows if row["step"]]
    assert len(levels) == STEPS and max(levels) < 10
    assert all(row["metrics"]["sentinel/actions"] > 0 for row in rows if row["step"])
