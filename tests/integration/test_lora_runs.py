"""Whole runs that train adapters: the job of docs/how-to/lora.md, and others made of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_testing.runs import run_recipe
from gcore_testing.safetensors_files import read_safetensors
from safetensors import safe_open

from gcore_core.contract.run_files import read_metrics
from gcore_core.contract.weights_hash import WeightsHash

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/lora.md"
SMALL = ["plugins=[]", "cluster.devices=4", "controller.config.prompts=8", "evaluation.prompts=8"]
SMALL += ["roles.policy.model.make.config={seed: 0, steps: 40}"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Gives the page's job, where the page says that it stands."""
    (text,) = re.findall(r"^```yaml\n(run:.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    shutil.copytree(ROOT / "recipes/quickstart", tmp_path / "recipes/quickstart")
    file = tmp_path / "recipes/lora.yaml"
    file.write_text(text)
    return file


def pushed_names(run: Path) -> list[list[str]]:
    """Returns the names of the tensors of pushes, as the journal has them."""
    lines = map(json.loads, (run / "tensors.jsonl").read_text().splitlines())
    return [line["names"] for line in lines if "names" in line]


def final(run: Path) -> str:
    weights = WeightsHash()
    for spec, content in read_safetensors(run / "weights/model.safetensors"):
        weights.add(spec, content.tobytes())
    return weights.hexdigest()


@pytest.mark.protects
def test_the_job_of_the_page_runs_pushes_adapters_alone_and_leaves_both_forms(
    job: Path, tmp_path: Path
) -> None:
    work = tmp_path / "run"
    run_recipe(job, work, [*SMALL, "run.steps=2"], 240)
    (names,) = pushed_names(work)
    assert names and all(".lora_" in name for name in names)
    gaps = [
        row["metrics"]["logprob_gap_max"]
        for row in read_metrics(work)
        if "logprob_gap_max" in row["metrics"]
    ]
    assert len(gaps) == 2 and max(gaps) < 1e-3
    with safe_open(work / "weights/adapter/adapter_model.safetensors", "np") as adapter:
        assert sorted(adapter.keys()) == sorted(names)
    settings = json.loads((work / "weights/adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (8, 16)
    weights = read_safetensors(work / "weights/model.safetensors")
    assert not any("lora" in spec.name for spec, _ in weights)


def metrics_after(run: Path, step: int) -> dict[int, dict[str, Any]]:
    kept = ("loss", "grad_norm", "kl", "reward", "logprob_gap_max")
    return {
        row["step"]: {name: row["metrics"][name] for name in kept}
        for row in read_metrics(run)
        if row["step"] > step and "loss" in row["metrics"]
    }


@pytest.mark.slow
def test_a_run_of_two_ranks_that_goes_on_with_one_has_the_same_losses_and_final_hash(
    job: Path, tmp_path: Path
) -> None:
    """Deterministic: the numbers are equal. Its checkpoints hold no weight of the base."""
    begun, resumed = tmp_path / "begun", tmp_path / "resumed"
    settings = [*SMALL, "run.steps=4", "run.deterministic=true", "evaluation.every=0"]
    settings += ["roles.policy.slots=2", "checkpoint={every: 1, last: 4}"]
    run_recipe(job, begun, settings, 400)
    shutil.copytree(begun, resumed)
    for step in (3, 4):
        shutil.rmtree(resumed / f"checkpoints/step-{step:06d}")
    shutil.rmtree(resumed / "weights")
    command = [sys.executable, "-m", "gcore_core", "resume", str(resumed), "roles.policy.slots=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    expected = metrics_after(begun, 2)
    assert expected.keys() == {3, 4}
    assert metrics_after(resumed, 2) == expected
    assert final(resumed) == final(begun)
    (state,) = (begun / "checkpoints/step-000002/policy").glob("state-00000-*.safetensors")
    with safe_open(state, "np") as opened:
        assert all(".lora_" in key for key in opened.keys())  # noqa: SIM118 (not a dict)


@pytest.mark.slow
def test_a_generator_that_cannot_take_adapters_gets_merged_weights(
    job: Path, tmp_path: Path
) -> None:
    """Here one that discards its weights when it sleeps; the run agrees as any other."""
    settings = [*SMALL, "run.steps=2", "roles.rollout.config.sleep=discard"]
    run_recipe(job, tmp_path / "run", settings, 240)
    (names,) = pushed_names(tmp_path / "run")
    assert not any("lora" in name for name in names)


def test_the_page_names_every_setting() -> None:
    from dataclasses import fields

    from gcore_language.lora_settings import LoraSettings

    named = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\|$", PAGE.read_text(), flags=re.M)
    assert sorted(named) == sorted(field.name for field in fields(LoraSettings))
    assert yaml.safe_load(re.findall(r"^```yaml\n(run:.*?)^```", PAGE.read_text(), re.M | re.S)[0])
