"""The parts of benchmarks/machines.py with Ray still run, in their shortest form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine]

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_runs_on_ray_and_its_object_store_are_measured(tmp_path: Path) -> None:
    """Bars are not held here: the machine may be busy, and one round says little."""
    out = tmp_path / "result.json"
    words = ["--short", "--parts", "ray", "object_store", "--ray", sys.executable]
    done = subprocess.run(
        [sys.executable, "benchmarks/machines.py", *words, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["benchmark"] == "machines_ray"
    values = {claim["name"]: claim["value"] for claim in result["claims"]}
    assert values["ray_weights_compared"] == 1
    assert values["ray_time_over_nodes"] > 0
    for way in ("ours_tls", "ours_plain", "ray_parts", "ray_one_object"):
        assert values[f"cross_node_step_s_{way}"] > 0
    assert values["left_behind_on_any_node"] == 0


def test_without_ray_the_parts_say_so_and_end(tmp_path: Path) -> None:
    bare = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    done = subprocess.run(
        [sys.executable, "benchmarks/machines.py", "--parts", "ray", "--ray", bare / "bin/python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "No module named 'ray'" in done.stderr
    assert "tests/engines/suites.py --create --engines ray" in done.stderr
