"""Real processes: a model split in any way trains as transformers' model does with torch's AdamW.

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

from tests.support import lockstep_ranks
from tests.support import megatron_trainers as tools

pytestmark = pytest.mark.engine

LIMIT_S = 540
PPO = ("PpoClip", {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01})
GSPO = ("Gspo", {"clip_low": 0.05, "clip_high": 0.05})
CISPO: tuple[str, dict[str, Any]] = ("Cispo", {})
SHARED = {"tensor_parallel": 2, "sequence_parallel": True}
PLAIN = {"distributed_optimizer": False}

#: name -> (family, ranks, settings, objective, the split whose state is resumed)
SPLITS: dict[str, tuple[str, int, dict[str, Any], tuple[str, dict[str, Any]], str]] = {
    "tensor": ("qwen2", 2, {"tensor_parallel": 2, "packing": "padded"}, PPO, ""),
    "none": ("qwen2", 1, {}, PPO, "tensor"),
    "pipeline": ("qwen2", 2, {"pipeline_parallel": 2}, PPO, "tensor"),
    "data": ("qwen2", 2, {"overlap_grad_reduce": True}, PPO, "pipeline"),
    "sequence": ("qwen3", 2, SHARED, GSPO, ""),
    # one record a micro-batch: some have no action in one rank's positions
    "context": ("qwen3", 2, {"context_parallel": 2, "budget_tokens": 1}, GSPO, "sequence"),
    "data, whole optimizer": ("llama", 2, PLAIN, CISPO, ""),
    "pipeline, whole optimizer": (
        "llama",
        2,
        {**PLAIN, "pipeline_parallel": 2, "gradient_checkpointing": True},
        CISPO,
        "data, whole optimizer",
    ),
    "tensor, pipeline": ("llama", 4, {**SHARED, "pipeline_parallel": 2}, CISPO, ""),
    "tensor, data": ("qwen2", 4, {"tensor_parallel": 2}, PPO, "tensor"),
    "context, pipeline": (
        "qwen3",
        4,
        {"context_parallel": 2, "pipeline_parallel": 2},
        GSPO,
        "context",
    ),
}


def run(work: Path, ranks: int, spec: dict[str, Any]) -> None:
    """All ranks of one trainer; raises with the output of one that failed."""
    work.mkdir()
    file = work / "spec.json"
    file.write_text(json.dumps({**spec, "ranks": ranks, "work": str(work)}))
    run_together(
        [["-m", "tests.support.megatron_ranks", str(file), str(rank)] for rank in range(ranks)],
        LIMIT_S,
    )


@pytest.fixture(scope="module")
def expected(
    models: dict[str, tuple[Path, Path]],
) -> Callable[[str, tuple[str, Any]], dict[str, Any]]:
    """What plain torch makes of the three steps, once for each family and objective."""
    known: dict[str, dict[str, Any]] = {}

    def of(family: str, objective: tuple[str, Any]) -> dict[str, Any]:
        if family + objective[0] not in known:
            plain = tools.Plain(*models[family], tools.SETTINGS, tools.make_objective(*objective))
            known[family + objective[0]] = {
                "kl": plain.kl(tools.inputs(0)[0]),
                "steps": [
                    (plain.train(*tools.inputs(step), 2, 2), plain.weights()) for step in range(3)
                ],
            }
        return known[family + objective[0]]

    return of


@pytest.fixture(scope="module")
def trained(
    models: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Runs a split when it is first asked for, after the one whose state it resumes.

    Returns the directory that it wrote. So a test needs no other test to have run before it.
    """
    works = tmp_path_factory.mktemp("works")
    finished: set[str] = set()

    def work_of(split: str) -> Path:
        if split in finished:
            return works / split
        family, ranks, settings, objective, resumed = SPLITS[split]
        model, reference = models[family]
        spec = {
            "settings": {**tools.SETTINGS, **settings, "reference_path": str(reference)},
            "model": str(model),
            "objective": objective,
            "resume": str(work_of(resumed) / "state") if resumed else "",
        }
        run(works / split, ranks, spec)
        finished.add(split)
        return works / split

    return work_of


@pytest.mark.parametrize(
    "split", [pytest.param(s, marks=pytest.mark.slow if SPLITS[s][1] > 2 else ()) for s in SPLITS]
)
def test_a_split_model_trains_like_an_unsplit_one(
    split: str, trained: Callable[[str], Path], expected: Any
) -> None:
    """Metrics, reference log-probs and weights; also from the state of another split, saved while
    training went on.
    """
    family, ranks, _, objective, resumed = SPLITS[split]
    work = trained(split)
    rank_numbers = [json.loads((work / f"numbers{rank}.json").read_text()) for rank in range(ranks)]
    weights = dict(np.load(work / "weights.npz"))
    plain = expected(family, objective)
    kl_of = {int(i): value for numbers in rank_numbers for i, value in numbers["kl"].items()}
    np.testing.assert_allclose([kl_of[i] for i in sorted(kl_of)], plain["kl"], atol=1e-5)
    for step, (metrics, _) in enumerate(plain["steps"]):
        for numbers in rank_numbers:
            for name, value in metrics.items():
                assert numbers["metrics"][step][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (
                    step,
                    name,
                )
    for when, step in (("two", 1), ("three", 2), *((("resumed", 2),) if resumed else ())):
        for name, value in plain["steps"][step][1].items():
            np.testing.assert_allclose(
                weights[f"{when}/{name}"], value, atol=1e-5, err_msg=f"{when} {name}"
            )
        assert sum(key.startswith(when + "/") for key in weights) == len(plain["steps"][step][1])
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (work / "pretrained" / name).is_file()


def test_replicas_pack_so_that_they_wait_less_than_first_come(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    as_packed, first_come = lockstep_ranks.waits_of("megatron", models["qwen2"][0], tmp_path)
    assert as_packed < first_come
