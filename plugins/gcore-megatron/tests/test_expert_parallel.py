"""Real processes: a mixture of experts that is split in any way trains as the trainer torch does on
one rank, with replayed routers and the load-balancing loss.

Tolerance 1e-5: float32 sums in another order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_testing.runs import run_together

from tests.support import expert_ranks
from tests.support import expert_trainers as experts

pytestmark = pytest.mark.engine

LIMIT_S = 600
SHARED = {"tensor_parallel": 2, "sequence_parallel": True}
STAGES = {"pipeline_parallel": 2}
WHOLE = {"checkpoint": "whole"}
PLAIN = {"distributed_optimizer": False}

#: It can repeat an update's passes, which its routers' metrics would count.
TORCH = {**expert_ranks.TORCH, "settings": {"resplit_every": 0}}

#: name -> (family, ranks, settings, the split whose state is resumed)
SPLITS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "one": ("mixed", 1, {}, "experts"),
    "one, whole": ("mixed", 1, WHOLE, "stages, whole"),
    "experts": ("mixed", 2, {"expert_parallel": 2}, "stages"),
    "experts, whole": ("mixed", 2, {"expert_parallel": 2, **WHOLE}, "one, whole"),
    "stages": ("mixed", 2, STAGES, "tensor, experts"),
    "stages, whole": ("mixed", 2, {**STAGES, **WHOLE, "gradient_checkpointing": True}, ""),
    "tensor, experts": ("mixed", 2, {**SHARED, "expert_parallel": 2}, "tensor"),
    "tensor": ("mixed", 2, {**SHARED, "gradient_checkpointing": True}, ""),
    "mixtral": ("mixtral", 2, {"expert_parallel": 2, "overlap_grad_reduce": True}, ""),
    "experts, whole optimizer": ("qwen3_moe", 2, {"expert_parallel": 2, **PLAIN}, ""),
    "data, whole optimizer": ("qwen3_moe", 2, PLAIN, "experts, whole optimizer"),
    "tensor, experts, stages": (
        "mixed",
        4,
        {**SHARED, **STAGES, "expert_parallel": 2},
        "data, experts",
    ),
    "data, stages": ("mixed", 4, {**STAGES, **PLAIN}, "one, whole"),
    "tensor, data, experts": ("mixed", 4, {**SHARED, "expert_parallel": 4, **WHOLE}, "one, whole"),
    "data, experts": ("mixed", 4, {"expert_parallel": 2}, ""),
}


#: Each way to split a mixture in two. Each but the last two goes on from the state of the next one.
QUICK = ("experts", "stages", "tensor, experts", "tensor", "mixtral")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("mixed", "mixtral", "qwen3_moe")
    return experts.save_models(tmp_path_factory.mktemp("experts"), families)


def run(work: Path, model: Path, ranks: int, spec: dict[str, Any]) -> dict[str, Any]:
    """All ranks of one trainer; raises with the output of one that failed."""
    (work / "meet").mkdir(parents=True)
    given = [str(ranks), str(model), str(work), json.dumps(spec)]
    run_together(
        [["-m", expert_ranks.__name__, str(rank), *given] for rank in range(ranks)], LIMIT_S
    )
    numbers: dict[str, Any] = json.loads((work / "numbers.json").read_text())
    return numbers


@pytest.fixture(scope="module")
def in_torch(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What the trainer torch makes of a family on one rank, made when it is first asked for."""
    works = tmp_path_factory.mktemp("torch")
    known: dict[str, dict[str, Any]] = {}

    def of(family: str) -> dict[str, Any]:
        if family not in known:
            known[family] = run(works / family, models[family], 1, TORCH)
        return known[family]

    return of


@pytest.fixture(scope="module")
def trained(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """Runs a split when it is first asked for, after the one whose state it resumes."""
    works = tmp_path_factory.mktemp("works")
    known: dict[str, dict[str, Any]] = {}

    def of(split: str) -> dict[str, Any]:
        if split not in known:
            family, ranks, settings, resumed = SPLITS[split]
            if resumed:
                of(resumed)
            spec = {
                "trainer": "gcore_megatron.trainer:MegatronTrainer",
                "config": "gcore_megatron.config:MegatronTrainerConfig",
                "settings": settings,
                "resume": str(works / resumed / "state") if resumed else "",
            }
            known[split] = run(works / split, models[family], ranks, spec)
        return known[split]

    return of


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any], when: str) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=f"{when} {name}")


@pytest.mark.parametrize(
    "split", [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in SPLITS]
)
def test_a_split_mixture_trains_like_one_rank_of_torch(
    split: str,
    trained: Callable[[str], dict[str, Any]],
    in_torch: Callable[[str], dict[str, Any]],
) -> None:
    """Losses, gradients' norms, router metrics and weights; also from the state of another split,
    saved while training went on.
    """
    family, _, _, resumed = SPLITS[split]
    expected = in_torch(family)
    found = trained(split)
    for step, (own, plain) in enumerate(zip(found["metrics"], expected["metrics"], strict=True)):
        for name in PLAIN_METRICS:
            assert own[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), (step, name)
        for name in plain.keys() & ROUTER_METRICS:
            assert own[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), (step, name)
        assert ROUTER_METRICS & own.keys() == ROUTER_METRICS & plain.keys()
    assert_same_weights(found["weights"], expected["weights"], "three steps")
    if resumed:
        again = found["metrics_again"]
        for name in (*PLAIN_METRICS, *ROUTER_METRICS):
            plain = expected["metrics"][2][name]
            assert again[name] == pytest.approx(plain, rel=1e-5, abs=1e-6), name
        assert_same_weights(found["weights_again"], expected["weights"], "resumed")


PLAIN_METRICS = ("loss", "grad_norm")
ROUTER_METRICS = {
    "router_aux_loss",
    "router_busiest_share",
    "router_differ_share",
    "router_entropy",
}
