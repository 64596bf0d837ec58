"""A run on the torch backend goes on from a checkpoint with other numbers of ranks and controllers
as it would have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS, AT = 6, 3
#: Sums of float32 in another order: of a gradient's norm, and of a tensor's largest weight.
TOLERANCE = 1e-6
#: About as large as gradients are: else Adam makes whole steps of the rounding of those that should
#: be zero.
EPS = 1e-2
Layout = tuple[int, int]  # trainer ranks, controllers
LAYOUTS: list[Layout] = [(1, 1), (2, 2), (3, 4)]
#: Pairs that every change tries: each layout once as the source and once as the target.
QUICK = [((2, 2), (2, 2)), ((1, 1), (3, 4)), ((3, 4), (1, 1))]


def g_core(directory: Path, cache: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gcore_core", *words],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def words(layout: Layout) -> tuple[str, str]:
    return f"roles.policy.slots={layout[0]}", f"controller.shards={layout[1]}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    """The directory of an uninterrupted run of a layout, which has a checkpoint after every
    step.
    """
    base, found = tmp_path_factory.mktemp("elastic"), dict[Layout, Path]()

    def run(layout: Layout) -> Path:
        if layout not in found:
            directory = base / "-".join(map(str, layout))
            directory.mkdir()
            job = yaml.safe_load((RECIPES / "quickstart.yaml").read_text())
            job["run"] |= {"steps": STEPS, "dir": str(directory / "run"), "deterministic": True}
            job["cluster"] = {"devices": 3}
            job["checkpoint"] = {"every": 1, "last": STEPS}
            job["controller"]["config"]["prompts"] = 8
            job["roles"]["policy"].setdefault("config", {})["eps"] = EPS
            job["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 40}
            del job["plugins"], job["evaluation"]
            text = yaml.safe_dump(job).replace("quickstart/", f"{RECIPES}/quickstart/")
            (directory / "job.yaml").write_text(text)
            g_core(directory, base / "cache", "run", "job.yaml", *words(layout))
            found[layout] = directory / "run"
        return found[layout]

    return run


def norms(run: Path) -> list[float]:
    """Gradient norms of the steps after the checkpoint, each as it was made last."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    latest = {
        row["step"]: row["metrics"]["grad_norm"] for row in rows if "grad_norm" in row["metrics"]
    }
    return [latest[step] for step in range(AT + 1, STEPS + 1)]


@pytest.mark.protects
@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(
            source,
            target,
            id=f"from {source} to {target}",
            marks=[] if (source, target) in QUICK else pytest.mark.slow,
        )
        for source in LAYOUTS
        for target in LAYOUTS
    ],
)
def test_a_run_resumed_with_other_layouts_gives_the_same_weights(
    source: Layout, target: Layout, whole: Callable[[Layout], Path], tmp_path: Path
) -> None:
    expected = whole(source)
    shutil.copytree(expected, tmp_path / "run")
    for step in range(AT + 1, STEPS + 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    shutil.rmtree(tmp_path / "run" / "weights")
    g_core(tmp_path, expected.parents[1] / "cache", "resume", str(tmp_path / "run"), *words(target))
    found = load_file(tmp_path / "run" / "weights" / "model.safetensors")
    wanted = load_file(expected / "weights" / "model.safetensors")
    assert found.keys() == wanted.keys()
    tolerance = 0 if source == target else TOLERANCE
    np.testing.assert_allclose(norms(tmp_path / "run"), norms(expected), rtol=tolerance)
    for name, tensor in wanted.items():
        most = float(np.abs(tensor).max())
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=tolerance * most, err_msg=name)
