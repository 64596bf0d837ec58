"""Ranks that share micro-batches train as plain torch does, at every stage of ZeRO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing.runs import run_together

from tests.support import deepspeed_trainers as tools
from tests.support import language_models as tiny

pytestmark = pytest.mark.engine

LIMIT_S = 540
#: Settings by name. Of four ranks, so those that share two by two are two data-parallel groups.
RUNS: dict[str, dict[str, Any]] = {
    "zero1, ring 2": {"config": {"stage": 1}, "context": {"ring": 2, "whole": "never"}},
    "zero2, ulysses 2": {"config": {"stage": 2}, "context": {"ulysses": 2}},
    "zero3, ring 2": {"config": {"stage": 3}, "context": {"ring": 2}},
    "zero3, both, recomputed": {
        "config": {"stage": 3, "gradient_checkpointing": True},
        "context": {"ring": 2, "ulysses": 2, "whole": "never"},
    },
    "zero3, ring 2, on the host": {
        "config": {"stage": 3, "offload_optimizer": True, "offload_params": True},
        "context": {"ring": 2, "whole": "never"},
    },
}


@pytest.fixture(scope="module")
def together(
    model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Returns the name of a run -> where its four ranks left what they found."""
    room = tmp_path_factory.mktemp("shared")
    works = {name: room / str(place) for place, name in enumerate(RUNS)}
    cases = [
        {"do": "updates", "model": str(model_dirs["qwen2"]), "work": str(works[name]), **settings}
        for name, settings in RUNS.items()
    ]
    for work in works.values():
        work.mkdir()
    _run_ranks(cases, 4, room)
    return works


def _run_ranks(cases: list[dict[str, Any]], ranks: int, room: Path) -> None:
    spec = room / "cases.json"
    spec.write_text(json.dumps(cases))
    module = "tests.support.deepspeed_ranks"
    run_together(
        [["-m", module, str(rank), str(ranks), str(spec)] for rank in range(ranks)], LIMIT_S
    )


@pytest.fixture(scope="module")
def plain(model_dirs: dict[str, Path]) -> dict[str, Any]:
    """Returns what plain torch makes of the same two updates."""
    model = tools.Plain(model_dirs["qwen2"], tools.SETTINGS)
    records = tools.make_records(seed=0)
    found: dict[str, Any] = {"logprobs": [model.logp(r).detach().numpy() for r in records]}
    for name, seed in (("first", 0), ("second", 1)):
        batch = tools.make_records(seed=seed)
        advantages = tiny.make_advantages(batch, seed=seed)
        told = model.update(batch, advantages, tiny.Reinforce())
        found[name] = told, model.weights()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_ranks_that_share_records_have_the_log_probs_of_plain_torch(
    name: str, together: dict[str, Path], plain: dict[str, Any]
) -> None:
    logprobs = json.loads((together[name] / "updates-rank0.json").read_text())["logprobs"]
    shares_all = len(logprobs) == len(plain["logprobs"])  # of one group
    expected = [one for i, one in enumerate(plain["logprobs"]) if shares_all or i % 4]
    assert shares_all == ("both" in name)
    for one, other in zip(logprobs, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_ranks_that_share_records_train_as_plain_torch(
    name: str, together: dict[str, Path], plain: dict[str, Any]
) -> None:
    """Loss, gradient norm before clipping and weights of two updates."""
    metrics = json.loads((together[name] / "updates-rank0.json").read_text())["metrics"]
    for step, when in zip(metrics, ("first", "second"), strict=True):
        told, weights = plain[when]
        assert (step["loss"], step["grad_norm"]) == pytest.approx(told, abs=1e-5, rel=1e-5)
        found = dict(np.load(together[name] / f"{when}.npz"))
        assert tools.largest_difference(found, weights) < 1e-5


def test_a_state_of_ranks_that_share_records_goes_on_without(
    model_dirs: dict[str, Path], together: dict[str, Path], plain: dict[str, Any], tmp_path: Path
) -> None:
    cases = []
    for place, (name, stage) in enumerate((("zero1, ring 2", 2), ("zero3, both, recomputed", 1))):
        work = tmp_path / str(place)
        work.mkdir()
        cases.append(
            {
                "do": "resume",
                "model": str(model_dirs["qwen2"]),
                "work": str(work),
                "config": {"stage": stage},
                "state": str(together[name] / "state"),
            }
        )
    _run_ranks(cases, 1, tmp_path)
    for case in cases:
        found = dict(np.load(Path(case["work"]) / "resumed.npz"))
        assert tools.largest_difference(found, plain["second"][1]) < 1e-5


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_of_values_is_trained_as_by_one_rank(
    stage: int, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "do": "values",
        "model": str(model_dirs["qwen2"]),
        "objective": "values",
        "config": {"stage": stage, "value_head_std": 0.5},
    }
    found = []
    for ranks, context in ((1, {}), (2, {"ring": 2, "whole": "never"})):
        room = tmp_path / str(ranks)
        (room / "work").mkdir(parents=True)
        case = {**given, "work": str(room / "work"), "context": context}
        _run_ranks([case], ranks, room)
        numbers = json.loads((room / "work" / "values-rank0.json").read_text())
        found.append((numbers, dict(np.load(room / "work" / "second.npz"))))
    (alone, weights), (shared, shared_weights) = found
    for one, other in zip(alone["values"], shared["values"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for one, other in zip(alone["metrics"], shared["metrics"], strict=True):
        keys = ("loss", "grad_norm")
        assert [one[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-4)
    assert tools.largest_difference(weights, shared_weights) < 1e-5


def test_in_bfloat16_shared_rows_are_computed_in_bfloat16(
    model_dirs: dict[str, Path], plain: dict[str, Any], tmp_path: Path
) -> None:
    """Log-probs are off those of float32 by a rounding of bfloat16, and by more than float32's."""
    (tmp_path / "work").mkdir()
    case = {
        "do": "told",
        "model": str(model_dirs["qwen2"]),
        "work": str(tmp_path / "work"),
        "config": {"stage": 2, "dtype": "bfloat16"},
        "context": {"ring": 2, "whole": "never"},
    }
    _run_ranks([case], 2, tmp_path)
    numbers = json.loads((tmp_path / "work" / "told-rank0.json").read_text())
    gaps = [
        float(np.abs(np.array(one) - other).max())
        for one, other in zip(numbers["logprobs"], plain["logprobs"], strict=True)
    ]
    assert 1e-4 < max(gaps) < 0.1
    assert numbers["metrics"]["grad_norm"] == pytest.approx(plain["first"][0][1], rel=0.05)
