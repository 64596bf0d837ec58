"""The job of docs/how-to/ppo.md in real processes, on the quickstart's task."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_language.models import load_reward_model
from gcore_testing.runs import run_together
from gcore_tools.export.of_checkpoint import export_step
from gcore_tools.export.of_run import export

from gcore_core.contract.run_files import read_metrics
from gcore_core.run.saved_weights import weights_sha256
from tests.support.language_models import save_model

#: A critic like torch's. The first process that annotates with version 2 is killed before it
#: answers.
DEADLY = """
import dataclasses, os
from pathlib import Path

import gcore_torch
from gcore_core import hookimpl


def make(config, context):
    from gcore_torch.trainer import TorchValueTrainer

    class Dies(TorchValueTrainer):
        def annotate(self, records):
            columns = super().annotate(records)
            if self.version == 2 and not os.path.exists("died"):
                Path("died").touch()
                os.kill(os.getpid(), 9)
            return columns

    return Dies(config, context)


@hookimpl
def gcore_trainers():
    (torch,) = gcore_torch.gcore_trainers()
    yield dataclasses.replace(torch, name="dies", factory="deadly:make")
"""
ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs/how-to/ppo.md"


def job_of_the_page() -> dict[str, Any]:
    (block, *_) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 15
    job: dict[str, Any] = yaml.safe_load(block)
    return job


def write_job(directory: Path) -> Path:
    """The page's job, on a tiny random model that is there, with few prompts."""
    save_model(directory / "my-model", "llama")
    job = job_of_the_page()
    job["run"] |= {"deterministic": True, "steps": 4}
    job["controller"]["config"] |= {"prompts": 8}
    job["roles"]["rollout"]["config"] |= {"max_new_tokens": 6}
    job["roles"]["critic"]["head_start"] = 1
    text = "import json\ndef exact(record):\n    return record.text.count('1') / 6\n"
    (directory / "arithmetic.py").write_text(text)
    rows = [json.dumps({"prompt": f"{i}+{i + 1}="}) for i in range(40)]
    (directory / "train.jsonl").write_text("\n".join(rows))
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def run_words(*words: str) -> None:
    run_together([["-m", "gcore_core", *words]])


@pytest.mark.slow
def test_weights_of_both_have_the_same_bits_on_other_ranks_and_after_a_resume_on_others(
    tmp_path: Path,
) -> None:
    file = write_job(tmp_path)
    one, other = tmp_path / "one", tmp_path / "other"
    run_words("run", str(file), f"run.dir={one}")
    slots = ["roles.policy.slots=2", "roles.critic.slots=1"]
    run_words("run", str(file), f"run.dir={other}", "run.steps=2", "checkpoint.every=2", *slots)
    run_words("resume", str(other), "run.steps=4", "roles.policy.slots=1", "roles.critic.slots=2")
    for name in ("weights", "weights-critic"):
        assert weights_sha256(one / name) == weights_sha256(other / name)
    rows = [json.loads(line)["metrics"] for line in (one / "metrics.jsonl").open()]
    assert ["loss" in row for row in rows[1:]] == [False, True, True, True]
    assert all("critic/explained_variance" in row for row in rows[1:])
    again = [json.loads(line)["metrics"] for line in (other / "metrics.jsonl").open()]
    for left, right in zip(rows[1:], again[1:], strict=True):
        for name in ("critic/loss", "critic/explained_variance", "reward"):
            assert left[name] == right[name]
    export(one, tmp_path / "critic", "critic")
    load_reward_model(str(tmp_path / "critic"), dtype="float32")
    export_step(other, 2, tmp_path / "critic-2", "critic")
    load_reward_model(str(tmp_path / "critic-2"), dtype="float32")


@pytest.mark.slow
def test_a_critic_that_is_killed_while_it_annotates_changes_no_bit_of_either_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_job(tmp_path)
    (tmp_path / "deadly.py").write_text(DEADLY)
    job = yaml.safe_load(file.read_text())
    job |= {"local": ["deadly.py"], "checkpoint": {"every": 1, "restarts": 1}}
    job["roles"]["critic"]["use"] = "deadly/dies"
    file.write_text(yaml.safe_dump(job))
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    run_words("run", str(file), f"run.dir={killed}")
    assert (tmp_path / "died").exists()
    run_words("run", str(file), f"run.dir={calm}")
    for name in ("weights", "weights-critic"):
        assert weights_sha256(killed / name) == weights_sha256(calm / name)
    assert taught(killed) == taught(calm)


def taught(run: Path) -> list[dict[str, Any]]:
    """Returns what each step of a run trained on and learned, without times."""
    names = ("actions", "reward", "loss", "critic/loss", "critic/explained_variance")
    return [{name: row["metrics"].get(name) for name in names} for row in read_metrics(run)]
