"""Trainers that sleep: their memory goes elsewhere, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcore_megatron.config import MegatronTrainerConfig
from gcore_megatron.memory import trainer_memory

from gcore_core.contract.errors import ContractError
from gcore_core.contract.memory import WorkerShape
from tests.support import expert_trainers, sleeping_ranks
from tests.support.language_models import Clip, make_advantages, make_context, make_records

pytestmark = pytest.mark.engine

#: What fills pages beside what is foreseen, as a share of it: ends of tensors, sums of norms.
_BESIDE = 0.03


#: name -> (family, settings)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas": ("qwen2", {"overlap_grad_reduce": True}),
    "whole state": (
        "llama",
        {"dtype": "bfloat16", "distributed_optimizer": False, "checkpoint": "whole"},
    ),
    "tensor": ("qwen2", {"tensor_parallel": 2, "sequence_parallel": True}),
    "pipeline": ("llama", {"pipeline_parallel": 2, "gradient_checkpointing": True}),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "replicas" else pytest.mark.slow) for name in LAYOUTS],
)
def test_ranks_have_the_bits_of_a_run_without_sleep(
    layout: str, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    family, settings = LAYOUTS[layout]
    slots = settings.get("tensor_parallel", 1) * settings.get("pipeline_parallel", 1)
    case = sleeping_ranks.case_of("megatron", models[family][0], slots=slots, **settings)
    ((without, slept),) = sleeping_ranks.found_by([case], tmp_path)
    assert slept == without


def test_ranks_that_spread_experts_have_the_bits_of_a_run_without_sleep(tmp_path: Path) -> None:
    """Experts have gradients and an optimizer of their own."""
    model = expert_trainers.save_models(tmp_path, ("mixed",))["mixed"]
    case = sleeping_ranks.case_of("megatron", model, slots=1, expert_parallel=2)
    ((without, slept),) = sleeping_ranks.found_by([case], tmp_path)
    assert slept == without


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return sleeping_ranks.save_large(tmp_path / "large")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [True, False], ids=["distributed optimizer", "whole optimizer"])
def test_a_rank_that_sleeps_gives_back_what_it_was_foreseen_to_hold(
    large: Path, dtype: Any, shared: bool, tmp_path: Path
) -> None:
    """Weights, gradients, optimizer and reference, by the pages of tensors and of the process."""
    from gcore_megatron.trainer import MegatronTrainer

    settings = MegatronTrainerConfig(dtype=dtype, distributed_optimizer=shared)
    objective = Clip(beta=0.1)
    trainer = MegatronTrainer(settings, make_context(large, objective, directory=str(tmp_path)))
    records = make_records(groups=1)
    trainer.prepare(records, frozenset())
    trainer.train(0, make_advantages(records), 1, 1)
    worker = WorkerShape(
        role="policy",
        device="cpu",
        slots=1,
        model={"path": str(large)},
        requires=frozenset({"ref_logp"}),
    )
    held = ("weights", "gradients", "optimizer", "reference")
    foreseen = sum(
        need.nbytes or 0
        for need in trainer_memory(settings, worker)
        if need.phase == "rollout" and need.what in held
    )
    awake = sleeping_ranks.anonymous_bytes()
    assert trainer.memory_bytes == pytest.approx(foreseen, rel=_BESIDE)
    trainer.sleep()
    assert trainer.memory_bytes < _BESIDE * foreseen
    assert awake - sleeping_ranks.anonymous_bytes() > (1 - _BESIDE) * foreseen
    trainer.wake()
    assert not list(tmp_path.glob("asleep-*"))
    trainer.close()


def test_whatever_needs_the_weights_is_refused_asleep(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """And is possible again after the wake, with what was there before."""
    from gcore_megatron.trainer import MegatronTrainer

    context = make_context(models["qwen2"][0], Clip(beta=0.1), directory=str(tmp_path))
    trainer = MegatronTrainer(MegatronTrainerConfig(**sleeping_ranks.SETTINGS), context)
    records = make_records(groups=2)
    advantages = make_advantages(records)
    engine = trainer._engine
    before = [array.tobytes() for _, array in trainer.export_weights()]
    batches = list(trainer.pack([list(enumerate(records))])[0])
    refused: dict[str, Callable[[], Any]] = {
        "prepare": lambda: trainer.prepare(records, frozenset({"kl_k1"})),
        "reference": lambda: engine.logprobs(batches, "reference"),
        "policy": lambda: engine.logprobs(batches, "policy"),
        "gradient": lambda: engine.accumulate(batches, lambda _, logp, __: logp.sum(), "metric"),
        "update": lambda: engine.update(1e-3, 1.0),
        "export": lambda: list(trainer.export_weights()),
        "save": lambda: trainer.save(tmp_path / "state"),
        "save in the background": lambda: trainer.begin_save(tmp_path / "state"),
        "load": lambda: trainer.load(tmp_path / "state"),
        "pretrained": lambda: trainer.save_pretrained(tmp_path / "pretrained"),
    }
    trainer.sleep()
    for name, call in refused.items():
        with pytest.raises(ContractError, match=r"sleeps"):
            call()
            pytest.fail(f"{name} is not refused")
    engine.discard()  # what a failed step does; there is no gradient
    trainer.wake()
    assert [array.tobytes() for _, array in trainer.export_weights()] == before
    trainer.prepare(records, frozenset({"kl_k1"}))
    trainer.train(0, advantages, 1, 1)
    trainer.close()
    assert not (tmp_path / "state").exists()
