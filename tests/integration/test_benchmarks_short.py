"""Every benchmark still runs on the present code: each in the shortest form that it has."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow


def short(name: str, *words: str, slow: bool = False) -> object:
    return pytest.param(name, words, id=name, marks=[SLOW] if slow else [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        short("startup", "--rounds", "1"),
        short("handover", "--rounds", "3"),
        short("balance", "--draws", "1"),
        short("placement_sim", "--seeds", "100:101", "--devices", "64", slow=True),
        short("engine_overhead", "--engines", "torch", "--rounds", "1", slow=True),
        short("rewards", slow=True),
        short(
            "controllers",
            *("--parts", "small", "readers", "--read-size", "0.1GB", "--read-rounds", "1"),
            slow=True,
        ),
    ],
)
def test_a_benchmark_measures_its_claims(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """Bars are not held here: the machine may be busy, and one round says little."""
    if name != "startup":
        pytest.importorskip("torch")
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *words, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["benchmark"] == name
    assert result["claims"]
    assert all(math.isfinite(claim["value"]) for claim in result["claims"])
    committed = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    measured = {claim["name"] for claim in result["claims"]}
    assert measured & {claim["name"] for claim in committed["claims"]}
