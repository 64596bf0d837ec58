"""The torch trainer learns from a teacher's columns as plain torch does, on one and two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_algorithms.teacher.config import TOP_IDS, TOP_LOGP
from gcore_testing.runs import run_together
from transformers import AutoModelForCausalLM

from tests.support import language_models as tiny
from tests.support import teacher_ranks

pytestmark = pytest.mark.rest

#: Float32 weights after two updates, in another order of additions.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, seed in (("policy", 0), ("teacher", 1)):
        tiny.save_model(root / name, "qwen2", seed=seed)
    return root / "policy", root / "teacher"


def numbers(work: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((work / "numbers.json").read_text())
    return read


@pytest.fixture(scope="module")
def alone(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Gives objective -> the numbers of one rank."""
    found = {}
    for objective in teacher_ranks.OBJECTIVES:
        work = tmp_path_factory.mktemp(objective)
        teacher_ranks.run(0, 1, objective, *models, work)
        found[objective] = numbers(work)
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, values in one["weights"].items():
        np.testing.assert_allclose(values, other["weights"][name], atol=ROUNDING, err_msg=name)


@pytest.mark.parametrize("objective", [pytest.param("reverse-kl", marks=pytest.mark.slow), "jsd"])
def test_two_ranks_have_the_weights_of_one_after_two_updates(
    objective: str, models: tuple[Path, Path], alone: dict[str, Any], tmp_path: Path
) -> None:
    words = ["2", objective, *map(str, models), str(tmp_path)]
    run_together([["-m", teacher_ranks.__name__, str(rank), *words] for rank in range(2)])
    together = numbers(tmp_path)
    assert_same(alone[objective], together)
    for one, other in zip(alone[objective]["metrics"], together["metrics"], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def plain_loss(objective: Any, model: Any, records: Any, advantages: np.ndarray) -> torch.Tensor:
    """Returns the loss from transformers' logits, with one row for each record."""
    columns = tiny.columns_of(records, advantages)
    whole = torch.cat([logits_of(model, record) for record in records])
    actions = torch.from_numpy(np.concatenate([r.columns["action_ids"] for r in records]))
    for name in teacher_ranks.COLUMNS:
        columns[name] = torch.from_numpy(np.concatenate([r.columns[name] for r in records]))
    current = {
        "logp": whole.gather(1, actions.long()[:, None])[:, 0],
        f"logp@{TOP_IDS}": whole.gather(1, columns[TOP_IDS].long()),
    }
    assert columns[TOP_LOGP].shape == (len(actions), teacher_ranks.K)
    loss, weight, _ = objective.loss(columns, current)
    return loss / weight


def logits_of(model: Any, record: Any) -> torch.Tensor:
    """Returns float32[A, vocabulary], log-probs at the record's temperature."""
    prompt, actions = (
        torch.from_numpy(record.columns[name].astype(np.int64))
        for name in ("prompt_ids", "action_ids")
    )
    logits = model(torch.cat([prompt, actions])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / float(record.columns["temperature"])).log_softmax(-1)


@pytest.mark.parametrize("objective", list(teacher_ranks.OBJECTIVES))
def test_two_updates_match_plain_torch(
    objective: str, models: tuple[Path, Path], alone: dict[str, Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    settings = {"learning_rate": 3e-3, "eps": 1e-3, "weight_decay": 0.0}
    optimizer = tiny.make_adamw(model, settings, (0.9, 0.95))
    losses = []
    for step in range(2):
        records = teacher_ranks.annotated(tiny.make_records(seed=step), *models)
        advantages = tiny.make_advantages(records, seed=step)
        loss = plain_loss(teacher_ranks.OBJECTIVES[objective](), model, records, advantages)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append(float(loss.detach()))
    found = [metrics["loss"] for metrics in alone[objective]["metrics"]]
    assert found == pytest.approx(losses, abs=ROUNDING)
    expected = {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}
    assert_same(alone[objective], {"weights": expected})
