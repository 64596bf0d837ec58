"""benchmarks/gpu.py on a machine without a GPU: it says what is missing, and its parts work."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from gcore_language.tiny import save_untrained

from tests.support.gpu_benchmark import MODULES, PARTS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    pytest.importorskip("gcore_torch")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("gpu")
        for name in MODULES:
            sys.modules.pop(name, None)


def test_a_machine_without_cuda_is_told_what_is_missing_and_nothing_fails() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--json", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["claims"] == []
    assert set(answer["missing"]) == set(PARTS)
    assert all("sees no CUDA device" in reason for reason in answer["missing"].values())
    assert "learns: not run, torch" in done.stderr


def test_its_tests_are_skipped_with_the_reason() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{len(PARTS)} skipped" in done.stdout
    assert "sees no CUDA device" in done.stdout


@pytest.mark.parametrize(
    "part",
    [
        "sleep",
        "tokens",
        pytest.param("bfloat16", marks=pytest.mark.slow),
        pytest.param("ipc", marks=pytest.mark.slow),
        pytest.param("busy", marks=pytest.mark.slow),
    ],
)
def test_a_part_can_be_run_on_a_cpu(part: str, gpu: ModuleType, tmp_path: Path) -> None:
    claims = gpu.PARTS[part](gpu.Setting(device="cpu", folder=tmp_path, rounds=1))
    assert [claim for claim in claims if claim.missed] == []
    assert all(claim.value > 0 for claim in claims if claim.unit in ("tokens/s", "pushes", "ratio"))


@pytest.mark.slow
def test_the_quickstart_learns_in_its_part(gpu: ModuleType, tmp_path: Path) -> None:
    claims = gpu.learns(gpu.Setting(device="cpu", folder=tmp_path))
    assert [claim for claim in claims if claim.missed] == []


def test_a_part_that_has_run_is_not_run_again(gpu: ModuleType, tmp_path: Path) -> None:
    save_untrained(tmp_path / "model")
    setting = gpu.Setting(
        device="cpu",
        folder=tmp_path,
        notes_overrides=(
            f"roles.policy.model={{path: {tmp_path / 'model'}}}",
            *("run.steps=3", "evaluation.prompts=2", "roles.rollout.config.max_new_tokens=4"),
        ),
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/config.yaml").touch()  # of a run that was ended, which begins anew
    claims = gpu.kept("notes", setting)
    values = {claim.name: claim.value for claim in claims}
    assert 0 <= values["notes_step_0"] <= 1
    assert all(values[f"notes_{stage}_actions_per_second"] > 0 for stage in ("rollout", "train"))
    shutil.rmtree(tmp_path / "model")
    assert gpu.kept("notes", setting) == claims


def test_a_part_names_the_libraries_that_it_lacks(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.NEEDED, "notes", ("peft", "no_such_library"))
    assert gpu.missing("notes", "cpu") == "no_such_library is not installed"


def test_the_job_beside_a_published_curve_is_one_that_check_takes(
    gpu: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("gcore_rewards")
    for name in ("train", "test"):
        row = {"question": "What is 1,000 + 1?", "answer": "It is 1,001.\n#### 1,001"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    save_untrained(tmp_path / "model")
    words = gpu.gpu_real.gsm8k_overrides(tmp_path, tmp_path / "model", tmp_path)
    checked = subprocess.run(
        [sys.executable, "-m", "gcore_core", "check", str(gpu.gpu_real.GSM8K), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    row = json.loads((tmp_path / "gsm8k_train.jsonl").read_text(encoding="utf-8"))
    assert row["answer"] == "1001"
    assert row["prompt"][0]["content"].startswith("What is 1,000 + 1? Let's think")
