"""The recipe's parts, and a short run of it in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from gcore_core.contract.factories import import_file
from gcore_core.contract.run_files import read_metrics, read_samples

RECIPE = Path(__file__).parents[3] / "recipes/digits.yaml"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return import_file(RECIPE.with_suffix("") / "digits.py")


def test_the_committed_files_are_what_the_script_writes(digits: ModuleType, tmp_path: Path) -> None:
    digits.write(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (RECIPE.with_suffix("") / name).read_bytes()


def test_no_held_out_picture_is_learned_from(digits: ModuleType) -> None:
    pytest.importorskip("sklearn")
    (learned, _), (held_out, labels) = digits.data()
    assert (len(learned), len(held_out)) == (1257, 540)
    distances = np.abs(learned.numpy()[:, None] - held_out.numpy()[None]).max(2)
    assert (distances == 0).sum() == 0
    assert min(np.bincount(labels.numpy())) > 40


def test_an_unknown_setting_of_the_maker_is_named(digits: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not step"):
        digits.teach(tmp_path, {"step": 3}, lambda *_: None)


@pytest.mark.slow
def test_a_short_run_learns_and_leaves_pictures(tmp_path: Path) -> None:
    """Real processes, two controllers; the model is taught for a third of the time."""
    words = [
        "run.steps=12",
        "evaluation.every=6",
        "evaluation.prompts=100",
        f"run.dir={tmp_path / 'run'}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "gcore_core", "run", str(RECIPE), *words]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    first, *_, last = read_metrics(tmp_path / "run")
    assert last["evaluation"]["greedy/digit"] > first["evaluation"]["greedy/digit"] + 0.1
    assert last["metrics"]["replay_gap"] <= 1e-6 and last["metrics"]["path_kl"] < 20
    assert {row["mode"] for row in read_samples(tmp_path / "run", 12)} == {"greedy", "sampled"}
    for name in ("contact_sheet.png", "samples/step_000000.png", "samples/step_000006.png"):
        assert Image.open(tmp_path / "run" / name).width > 0
    assert "contact_sheet.png" in (tmp_path / "run/summary.md").read_text()
    assert not (tmp_path / "run/alarms.jsonl").exists()
