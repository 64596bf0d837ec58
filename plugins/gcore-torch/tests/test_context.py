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
    """Returns a directory with what one rank came to, and what four did in some cases."""
    room = tmp_path_factory.mktemp("shared")
    resume = room / "alone" / "state"
    alone = context_trainers.run(0, 1, model_dirs["qwen2"], room / "alone", resume=resume)
    (room / "alone" / "numbers.json").write_text(json.dumps(alone))
    run_cases(room, model_dirs, *context_trainers.CASES)
    return room


def run_cases(work: Path, model_dirs: dict[str, Path], *cases: str) -> None:
    words = ["4", str(model_dirs["qwen2"]), str(work), *cases]
    run_together([["-m", context_trainers.__name__, str(rank), *words] for rank in range(4)])


def numbers_of(work: Path, case: str) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((work / case / "numbers.json").read_text())
    return numbers


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the largest distance of two runs' gradients, as a share of their norm."""
    gaps = []
    for first, second in zip(one["gradients"], other["gradients"], strict=True):
        assert first.keys() == second.keys()
        expected = np.concatenate([first[name] for name in first])
        gradient = np.concatenate([second[name] for name in first])
        gaps.append(np.linalg.norm(gradient - expected) / np.linalg.norm(expected))
    return float(max(gaps))


def assert_same_gradients(alone: dict[str, Any], shared: dict[str, Any]) -> None:
    # each update after the first begins from weights that differ by rounding
    assert len(alone["gradients"]) == len(shared["gradients"]) == 8
    assert furthest(alone, shared) <= _GRADIENT


def assert_same_training(alone: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("metrics", "resumed"):
        for one, another in zip(alone[key], other[key], strict=True):
            assert one == pytest.approx(another, rel=1e-4, abs=1e-6)
    for key in ("weights", "after"):
        assert alone[key].keys() == other[key].keys()
        for name, values in alone[key].items():
            np.testing.assert_allclose(values, other[key][name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", context_trainers.CASES)
def test_slots_that_share_records_train_as_one_slot_from_its_state_too(
    case: str, work: Path
) -> None:
    assert_same_gradients(numbers_of(work, "alone"), numbers_of(work, case))
    assert_same_training(numbers_of(work, "alone"), numbers_of(work, case))


def test_a_state_of_slots_that_share_records_is_gone_on_from_by_one_slot(
    work: Path, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    for case in context_trainers.CASES:
        resume = work / case / "state"
        back = context_trainers.run(0, 1, model_dirs["qwen2"], tmp_path / case, resume=resume)
        assert_same_training(numbers_of(work, "alone"), back)


@pytest.mark.slow
def test_other_meshes_and_gradient_checkpointing_train_as_one_slot(
    work: Path, model_dirs: dict[str, Path]
) -> None:
    run_cases(work, model_dirs, *context_trainers.MORE_CASES)
    for case in context_trainers.MORE_CASES:
        assert_same_gradients(numbers_of(work, "alone"), numbers_of(work, case))
        assert_same_training(numbers_of(work, "alone"), numbers_of(work, case))
