"""Pairs stay together, so the gradient is that of whole pairs however a minibatch is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language.tiny import save_model
from gcore_testing.runs import run_together

from tests.support import offline_ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    save_model(directory, "llama")
    return directory


def numbers(work: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((work / "numbers.json").read_text())
    return read


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Weights to 1e-5, where a step moves them by up to 3e-3; float32 sums in another order."""
    for left, right in zip(one["metrics"], other["metrics"], strict=True):
        names = {name for name in left if not name.startswith(("logprob", "busy"))}
        for name in names:
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-5), name
    assert one["weights"].keys() == other["weights"].keys()
    for name, values in one["weights"].items():
        np.testing.assert_allclose(values, other["weights"][name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("objective", ["dpo", "bradley-terry"])
def test_small_micro_batches_give_the_weights_of_one(
    objective: str, model: Path, tmp_path: Path
) -> None:
    """With a budget of one token every micro-batch is one pair; with many all pairs are in one."""
    for name, budget in (("pairs", 1), ("whole", 10_000)):
        offline_ranks.run(0, 1, objective, model, tmp_path / name, budget)
    assert_same(numbers(tmp_path / "pairs"), numbers(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("objective", sorted(offline_ranks.OBJECTIVES))
def test_two_ranks_give_the_weights_of_one(objective: str, model: Path, tmp_path: Path) -> None:
    offline_ranks.run(0, 1, objective, model, tmp_path / "one")
    two = tmp_path / "two"
    (two / "meet").mkdir(parents=True)
    given = ["2", objective, str(model), str(two)]
    run_together([["-m", offline_ranks.__name__, str(rank), *given] for rank in range(2)])
    assert_same(numbers(tmp_path / "one"), numbers(two))
