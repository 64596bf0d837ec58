"""Whole runs in bfloat16 with one planted fault: it is told as what it is, and the run is saved.

The recipe is the quickstart, in processes of its own, with two replicas.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gcore_sentinel
import pytest

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
TABLE = Path(gcore_sentinel.__file__).parent / "tables" / "torch-torch-bfloat16-quickstart.json"
STEPS = 16


def run(
    tmp_path: Path, fault: str, replica: int, *more: str, **environment: str
) -> subprocess.CompletedProcess[str]:
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
        "sentinel.use=sentinel",
        f"sentinel.config.table={tmp_path / 'table.json'}",
        *more,
    ]
    command = [sys.executable, "-m", "gcore_core", "run", str(RECIPE), *overrides]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, **environment},
    )


def check_saved(directory: Path, step: int) -> None:
    """The newest checkpoint is one of the last two steps before the one that ended the run."""
    saved = [int(path.name.removeprefix("step-")) for path in directory.glob("checkpoints/step-*")]
    assert step < 2 or max(saved, default=0) >= step - 1, (step, saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "replica", "since", "cause"),
    [
        ("old", 1, range(3, 6), r"rollout\.1 holds weights of version (\d+) in \d+ of 21 tensors"),
        ("zeroed", 0, range(3, 4), r"rollout\.0 holds other bytes .* 1 of 21 .*: .*down_proj"),
        ("temperature", 1, range(3), r"likely cause: .* samples at 0\.9(8[5-9]|9[0-4]?)\d? times"),
        (
            "shifted",
            1,
            range(1),
            r"likely cause: log-probs are shifted by one: .* the action before",
        ),
        ("masked", 1, range(2), r"the last action of each of \d+ records is masked"),
    ],
)
def test_a_fault_in_a_run_is_told_as_what_it_is_and_the_run_is_saved(
    tmp_path: Path, fault: str, replica: int, since: range, cause: str
) -> None:
    done = run(tmp_path, fault, replica)
    said = done.stdout + done.stderr
    assert done.returncode == 6, said[-3000:]
    alarm = re.search(
        rf"step (\d+): rollout\.{replica} and the trainer disagree about log-probs since step (\d+)"
        r"\n.*; records of this step are of version (\d+)\n",
        said,
    )
    assert alarm is not None, said[-3000:]
    step, first, version = map(int, alarm.groups())
    assert first in since and first <= step < STEPS, alarm[0]
    assert version == step
    told = re.search(cause, said)
    assert told is not None, said[-3000:]
    if fault == "old":
        assert int(told[1]) == 2  # what it had when the fault began
    check_saved(tmp_path / "run", step)


@pytest.mark.slow
def test_rewards_of_the_row_beside_are_told_by_their_receipts(tmp_path: Path) -> None:
    """No log-prob shows it, so the sentinel is silent: another check of the same run tells it.

    In one process, since controllers of their own do not import a generator's plugin.
    """
    inline = "launcher.use=core/inline"
    done = run(tmp_path, "none", -1, inline, GCORE_TEST_REWARDS_BESIDE="1")
    said = done.stdout + done.stderr
    assert done.returncode == 6, said[-3000:]
    told = re.search(
        r"advantages of shard \d, sampled by replica [01] with version (\d+): record (\d+)/\d has "
        r"rewards that no scorer gave it\n  they belong to another record",
        said,
    )
    assert told is not None, said[-3000:]
    version, ordinal = map(int, told.groups())
    assert version == ordinal // 32 == 3, told[0]  # each step has the next 32 prompts
    check_saved(tmp_path / "run", version)


@pytest.mark.slow
def test_a_healthy_run_in_bfloat16_goes_to_its_end(tmp_path: Path) -> None:
    done = run(tmp_path, "none", -1)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    levels = [row["metrics"]["sentinel/log_e"] for row in rows if row["step"]]
    assert len(levels) == STEPS and max(levels) < 10
    assert all(row["metrics"]["sentinel/actions"] > 0 for row in rows if row["step"])
