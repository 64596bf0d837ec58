"""README's reward, its job and its Python call train a model of one's own, as they stand there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gcore_core.contract.run_files import read_metrics

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## Your own model")[2].partition("\n## ")[0]
STEPS = 2


def block(language: str, holds: str) -> str:
    """The first block of the section in a language that holds a text."""
    blocks = re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", SECTION, re.M | re.S)
    return next(text for text in blocks if holds in text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What README's reader has: a model, rows, and the reward of the page."""
    language = pytest.importorskip("gcore_language.tiny")
    language.save_model(tmp_path / "my-model", "llama")
    rows = [{"prompt": f"{n}+3=", "answer": str(n + 3)} for n in range(64)]
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(block("python", "def right"))
    return tmp_path


def run(folder: Path, *words: str) -> str:
    """Runs the interpreter where nothing but the reader's files lies."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.protects
def test_the_reward_and_the_job_of_readme_train_a_model(folder: Path) -> None:
    (folder / "job.yaml").write_text(block("yaml", "roles:"))
    assert len(block("python", "def right").splitlines()) <= 5
    assert len(block("yaml", "roles:").splitlines()) <= 15
    assert "nothing wrong found" in run(folder, "-m", "gcore_core", "check", "job.yaml")
    small = ("controller.config.prompts=4", "roles.rollout.config.max_new_tokens=8")
    run(folder, "-m", "gcore_core", "run", "job.yaml", f"run.steps={STEPS}", *small)
    assert read_metrics(folder / "runs/mine/001")[-1]["step"] == STEPS


@pytest.mark.protects
def test_the_call_of_readme_trains_the_same_model(folder: Path) -> None:
    text = block("python", "gcore.train")
    small = text.replace('"steps": 200', f'"steps": {STEPS}').replace("tokens=256", "tokens=8")
    assert small.count(f'"steps": {STEPS}') == 1 and "tokens=8" in small
    (folder / "train.py").write_text(small)
    run(folder, "train.py")
    (directory,) = folder.glob("runs/*/001")
    assert read_metrics(directory)[-1]["step"] == STEPS


@pytest.mark.protects
def test_the_two_commands_of_readme_are_its_first_two_blocks_of_shell() -> None:
    first, second, *_ = re.findall(r"^```sh\n(.*?)^```$", README, re.M | re.S)
    assert first.rstrip().endswith(".venv/bin/g-core demo --steps 20")
    assert "-r requirements.txt" in first
    assert second.rstrip().endswith(".venv/bin/tox run")
    assert second.rstrip() in (ROOT / ".ci/run").read_text(encoding="utf-8")
