"""Real runs on answers that rows have: what must not depend on shards, on a stop, or on chance."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gcore_language.tiny import save_model
from gcore_torch.config import TorchRewardConfig
from gcore_torch.reward import TorchReward

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.order import row_of
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord
from tests.support.runs import REPOSITORY

ROWS = 22
PROMPTS = 4


def run(directory: Path, job: Path, *words: str, verb: str = "run") -> str:
    """Runs ``g-core`` as a user does; returns what it printed."""
    command = [sys.executable, "-m", "gcore_core", verb, str(job), *words]
    environment = {"OMP_NUM_THREADS": "1", "G_CORE_CACHE": str(directory / "cache")}
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and pairs one of which has equal answers and one of which is too long."""
    directory: Path = tmp_path_factory.mktemp("offline")
    save_model(directory / "model", "llama")
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(ROWS)]
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[5]["chosen"] = "1" * 200
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "pairs.jsonl").write_text(text)
    return directory


def job(folder: Path, name: str, **changes: Any) -> Path:
    """A DPO job of two epochs, deterministic, on that folder's rows."""
    data = {"use": "offline/pairs", "config": {"path": "pairs.jsonl"}}
    settings: dict[str, dict[str, Any]] = {
        "run": {"steps": 30, "epochs": 2, "seed": 3, "deterministic": True, "dir": name},
        "controller": {
            "use": "offline/pairs",
            "shards": 1,
            "config": {"prompts": PROMPTS, "minibatches": 2},
        },
        "data": data,
        "evaluation": {"every": 4, "prompts": 8, "data": data},
        "objective": {"use": "offline/dpo"},
        "roles": {
            "policy": {
                "use": "torch",
                "model": {"path": "./model"},
                "config": {"learning_rate": 1e-3},
            },
            "rollout": {"use": "offline"},
        },
    }
    for key, value in changes.items():
        settings[key] = {**settings[key], **value}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def metrics(ran: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ran / "metrics.jsonl").read_text().splitlines()]


def weights(ran: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    tensors: dict[str, np.ndarray] = load_file(ran / "weights" / "model.safetensors")
    return tensors


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name], err_msg=name)


@pytest.mark.slow
def test_each_row_trains_once_an_epoch_and_what_is_dropped_is_counted(folder: Path) -> None:
    run(folder, job(folder, "once"))
    rows = metrics(folder / "once")[1:]
    consumed = [
        ordinal
        for row in rows
        for ordinal in range(
            int(row["metrics"]["ordinals/first"]), int(row["metrics"]["ordinals/next"])
        )
    ]
    assert consumed == list(range(len(consumed))), "no ordinal twice, none left out"
    assert len(consumed) >= 2 * ROWS
    first_epochs = Counter(row_of(ordinal, ROWS, 3)[1] for ordinal in consumed[: 2 * ROWS])
    assert set(first_epochs.values()) == {2}
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({n: v for n, v in row["metrics"].items() if n.startswith("groups/")})
    assert sums["groups/dropped/equal_answers"] >= 2
    assert sums["groups/dropped/prompt_too_long"] >= 2
    assert sums["groups/filtered"] == sums["groups/dropped/prompt_too_long"]
    verdicts = ("trained", "filtered", "quarantined")
    assert sum(sums[f"groups/{verdict}"] for verdict in verdicts) == len(consumed)
    evaluated = [row["evaluation"] for row in rows if row["evaluation"]]
    assert evaluated[0]["given/dropped"] == 2
    assert evaluated[-1]["given/loss"] < evaluated[0]["given/loss"]


@pytest.mark.slow
def test_two_shards_give_the_weights_of_one(folder: Path) -> None:
    """So do two shards that end after four steps and are resumed."""
    run(folder, job(folder, "one"))
    run(folder, job(folder, "two", controller={"shards": 2}))
    assert_equal(weights(folder / "one"), weights(folder / "two"))
    stopped = job(folder, "stopped", controller={"shards": 2})
    run(folder, stopped, "run.steps=4", "checkpoint.every=4")
    run(folder, folder / "stopped", "run.steps=30", verb="resume")
    assert len(metrics(folder / "stopped")) == len(metrics(folder / "one"))
    assert_equal(weights(folder / "one"), weights(folder / "stopped"))


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["<pad>", "<eos>"])
def test_a_reward_model_is_read_where_it_was_trained(tmp_path: Path, padding: str) -> None:
    """Trained with a learning rate of 0, its metrics are the scores that it gives as a reward."""
    model = tmp_path / "model"
    save_model(model, "llama")
    (model / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    config = json.loads((model / "config.json").read_text())
    pad = {"<pad>": 0, "<eos>": config["eos_token_id"]}[padding]
    (model / "config.json").write_text(json.dumps({**config, "pad_token_id": pad}))
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"1+{i}="}],
            "chosen": [{"role": "assistant", "content": str(i + 1)}],
            "rejected": [{"role": "assistant", "content": "9*9"}],
        }
        for i in range(PROMPTS)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = yaml.safe_load(job(tmp_path, "trained").read_text())
    settings["run"] = {"steps": 1, "seed": 1, "dir": "trained"}
    settings["evaluation"] = {}
    settings["controller"]["config"]["minibatches"] = 1
    settings["objective"] = {"use": "offline/bradley-terry"}
    settings["roles"]["policy"]["config"] = {"learning_rate": 0.0, "value_head_std": 1.0}
    settings["roles"]["rollout"] = {"use": "offline/texts"}
    (tmp_path / "trained.yaml").write_text(yaml.safe_dump(settings))
    run(tmp_path, tmp_path / "trained.yaml")
    trained = metrics(tmp_path / "trained")[-1]["metrics"]
    path = str(tmp_path / "trained" / "weights")
    reward = TorchReward(TorchRewardConfig(path=path), WorkerContext(role="scorer"))
    for which in ("chosen", "rejected"):
        scores = reward.score([answered(pair["prompt"], pair[which]) for pair in pairs])
        mean = sum(score.value or 0.0 for score in scores) / len(scores)
        assert mean == pytest.approx(trained[f"rewards/{which}"], rel=1e-4, abs=1e-4)


def answered(prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> ScoredRecord:
    return ScoredRecord(
        ordinal=0,
        sample=0,
        prompt=Prompt(row=0, messages=prompt),
        text=answer[0]["content"],
        status="finished",
        columns={},
    )


@pytest.mark.slow
def test_the_chain_of_recipes_learns(tmp_path: Path) -> None:
    """Supervised fine-tuning, a reward model that begins with it, and PPO that it rewards."""
    for name in ("chain", "quickstart"):
        shutil.copytree(REPOSITORY / "recipes" / name, tmp_path / "recipes" / name)
    chain = tmp_path / "recipes" / "chain"
    run(tmp_path, chain / "sft.yaml")
    run(tmp_path, chain / "reward_model.yaml")
    run(tmp_path, chain / "ppo.yaml")
    evaluated = [
        [row["evaluation"] for row in metrics(tmp_path / "runs/chain" / stage) if row["evaluation"]]
        for stage in ("sft", "reward_model", "ppo")
    ]
    assert evaluated[0][-1]["given/loss"] < evaluated[0][0]["given/loss"]
    assert evaluated[1][-1]["given/rewards/accuracy"] > 0.7
    assert evaluated[2][-1]["greedy/quality"] > evaluated[2][0]["greedy/quality"]
    assert evaluated[2][-1]["sampled/exact"] > evaluated[2][0]["sampled/exact"] + 0.1
