"""Slots that share micro-batches train as one slot does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_core.testing.runs import run_together
from tests.support import context_trainers

#: float32, sums in another order.
_GRADIENT = 1e-5


@pytest.fixture(scope="module")
def work(model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with what one rank and four ranks came to, by case."""
    room = tmp_path_factory.mktemp("shared")
    model = model_dirs["qwen2"]
    resume = room / "alone" / "state"
    alone = context_trainers.run(0, 1, model, room / "alone", resume=resume)
    (room / "alone" / "numbers.json").write_text(json.dumps(alone))
    program = ["-m", context_trainers.__name__]
    run_together([[*program, str(rank), "4", str(model), str(room)] for rank in range(4)])
    return room


def numbers_of(work: Path, case: str) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((work / case / "numbers.json").read_text())
    return numbers


@pytest.mark.parametrize("case", context_trainers.CASES)
def test_gradients_of_slots_that_share_records_are_those_of_one_slot(case: str, work: Path) -> None:
    alone, shared = numbers_of(work, "alone"), numbers_of(work, case)
    # each update after the first begins from weights that differ by rounding
    assert len(alone["gradients"]) == len(shared["gradients"]) == 8
    for one, other in zip(alone["gradients"], shared["gradients"], strict=True):
        assert one.keys() == other.keys()
        expected = np.concatenate([one[name] for name in one])
        gradient = np.concatenate([other[name] for name in one])
        gap = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
        assert gap <= _GRADIENT


@pytest.mark.parametrize("case", context_trainers.CASES)
def test_metrics_and_weights_of_slots_that_share_records_are_those_of_one_slot(
    case: str, work: Path
) -> None:
    alone, shared = numbers_of(work, "alone"), numbers_of(work, case)
    for key in ("metrics", "resumed"):
        for one, other in zip(alone[key], shared[key], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    for key in ("weights", "after"):
        for name, values in alone[key].items():
            np.testing.assert_allclose(values, shared[key][name], atol=1e-5, err_msg=name)


def test_a_state_of_slots_that_share_records_is_gone_on_from_by_one_slot(
    work: Path, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    state = work / "ring 2, ulysses 2" / "state"
    back = context_trainers.run(0, 1, model_dirs["qwen2"], tmp_path, resume=state)
    alone = numbers_of(work, "alone")
    assert back["resumed"][0] == pytest.approx(alone["resumed"][0], rel=1e-4, abs=1e-6)
    for name, values in alone["after"].items():
        np.testing.assert_allclose(values, back["after"][name], atol=1e-5, err_msg=name)
