"""Placement on real engines: its benchmark in the shortest form, and the shipped recipe's moves."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gcore_core.contract import run_files
from gcore_core.testing.runs import run_recipe

ROOT = Path(__file__).parents[2]
QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


def measure(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/placement_real.py", *words, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(QUOTA, os.W_OK), reason="no cgroup can be made here"
)
def test_policies_are_measured_on_real_engines(tmp_path: Path) -> None:
    """Bars are not held here: the machine may be busy, and ten steps say little."""
    pytest.importorskip("gcore_torch")
    done = measure(tmp_path / "result.json", "--short", "--keep", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr[-3000:]
    claims = {
        claim["name"]: claim["value"]
        for claim in json.loads((tmp_path / "result.json").read_text())["claims"]
    }
    for name in (
        "replay_time_over_best_fixed",
        "replay_throughput_over_colocated",
        "prediction_error_median",
    ):
        assert math.isfinite(claims[name]) and claims[name] > 0
    assert claims["split_2_moved_devices"] == 0 < claims["colocated_moved_devices"]
    # The answers are as long as the rows say, so both roles had what the load says to do.
    _, outcomes = run_files.read_placement(tmp_path / "runs" / "0_replay" / "run")
    assert {outcome.work for outcome in outcomes.values()} != {0.0}
    for role in ("rollout", "judge"):
        assert all(outcome.engines[role].requests == 64 for outcome in outcomes.values())


@pytest.mark.slow
def test_without_cgroups_the_benchmark_says_why_and_stops(tmp_path: Path) -> None:
    """Nobody's own user may make them; the words are those of the kernel's refusal."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, pathlib\n"
            "sys.path.insert(0, 'benchmarks')\n"
            "import placement_real\n"
            f"placement_real.CGROUP = pathlib.Path({str(tmp_path / 'none')!r})\n"
            "placement_real.Devices()\n",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot make a cgroup with half a core" in done.stderr
    assert "needs root and the cpu controller of cgroup v1" in done.stderr


@pytest.mark.slow
def test_the_shipped_judge_recipe_moves_devices(tmp_path: Path) -> None:
    for plugin in ("gcore_torch", "gcore_genrm", "gcore_placement"):
        pytest.importorskip(plugin)
    run_dir = tmp_path / "run"
    run_recipe(ROOT / "recipes" / "judge.yaml", run_dir, ["run.steps=40"], 900)
    decisions, outcomes = run_files.read_placement(run_dir)
    assert len({len(decided.cells["judge"]) for decided in decisions.values()}) > 1
    assert sum(outcome.moved for outcome in outcomes.values()) > 0
    # Profiles are of these engines: rounds of some milliseconds, and each term with its error.
    for fit in list(outcomes.values())[-1].engines.values():
        assert fit.requests and fit.measured_s > 0
        assert set(fit.errors) == {"base_s", "running_s", "cached_s", "prefill_s"}
