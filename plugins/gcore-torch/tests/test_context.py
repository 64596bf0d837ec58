"""Slots that share micro-batches train as one slot does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing.runs import run_together

from tests.support import context_trainers

pytestmark = pytest.mark.rest

#: float32, sums in another order.
_GRADIENT = 1e-5
#: bfloat16: the same number of roundings, in other places. Found were 0.5 to 1.1.
_ROUNDING = 1.3


@pytest.fixture(scope="module")
def work(model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with what one rank came to, and what four did in some cases."""
    room = tmp_path_factory.mktemp("shared")
    resume = room / "alone" / "state"
    alone = context_trainers.run(0, 1, model_dirs["qwen2"], room / "alone", resume=resume)
    (room / "alone" / "numbers.json").write_text(json.dumps(alone))
    run_cases(room, model_dirs, *context_trainers.CASES)
    return room


def run_cases(work: Path, model_dirs: dict[str, Path], *cases: str, ranks: int = 4) -> None:
    words = [str(ranks), str(model_dirs["qwen2"]), str(work), *cases]
    run_together([["-m", context_trainers.__name__, str(rank), *words] for rank in range(ranks)])


def run_alone(work: Path, model_dirs: dict[str, Path], like: str) -> dict[str, Any]:
    """Returns what one rank comes to, and leaves its state for the cases that are like it."""
    room = work / like
    return context_trainers.run(0, 1, model_dirs["qwen2"], room, like=like, resume=room / "state")


def numbers_of(work: Path, case: str) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((work / case / "numbers.json").read_text())
    return numbers


def distances(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Returns for each update how far two runs' gradients are apart, as a share of their norm."""
    gaps = []
    for first, second in zip(one["gradients"], other["gradients"], strict=True):
        assert first.keys() == second.keys()
        expected = np.concatenate([first[name] for name in first])
        gradient = np.concatenate([second[name] for name in first])
        gaps.append(np.linalg.norm(gradient - expected) / np.linalg.norm(expected))
    return list(map(float, gaps))


def assert_same_gradients(alone: dict[str, Any], shared: dict[str, Any]) -> None:
    # each update after the first begins from weights that differ by rounding
    assert len(alone["gradients"]) == len(shared["gradients"]) == 8
    assert max(distances(alone, shared)) <= _GRADIENT


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


@pytest.mark.slow
@pytest.mark.parametrize("case", context_trainers.REPLICAS)
def test_replicas_of_shards_whose_slots_share_records_train_as_one_slot(
    case: str, work: Path, model_dirs: dict[str, Path]
) -> None:
    run_cases(work, model_dirs, case)
    assert_same_gradients(numbers_of(work, "alone"), numbers_of(work, case))
    assert_same_training(numbers_of(work, "alone"), numbers_of(work, case))


@pytest.mark.slow
def test_adapters_values_and_offload_train_as_on_one_slot(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    likes = ("adapters", "value head", "values", "alone")
    alone = {like: run_alone(tmp_path, model_dirs, like) for like in likes}
    run_cases(tmp_path, model_dirs, *context_trainers.OTHERS, ranks=2)
    for case, settings in context_trainers.OTHERS.items():
        assert_same_gradients(alone[settings["like"]], numbers_of(tmp_path, case))
        assert_same_training(alone[settings["like"]], numbers_of(tmp_path, case))


@pytest.mark.slow
def test_in_bfloat16_slots_that_share_are_as_near_to_float32_as_one_slot_is(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """The loss has no edge. PPO's clip takes away the whole gradient of an action beyond it, and in
    bfloat16 two one-slot runs that pack records otherwise put some action on other sides of it.
    """
    exact = run_alone(tmp_path, model_dirs, "float32")
    alone = run_alone(tmp_path, model_dirs, "bfloat16")
    run_cases(tmp_path, model_dirs, *context_trainers.ROUGH, ranks=2)
    for case in context_trainers.ROUGH:
        shared = numbers_of(tmp_path, case)
        own = distances(exact, alone)
        assert len(own) == 8
        for update, (sharing, noise) in enumerate(zip(distances(exact, shared), own, strict=True)):
            assert sharing <= _ROUNDING * noise < 0.05, (case, update)
