"""Trainers that sleep: their memory goes elsewhere, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcore_deepspeed.config import DeepSpeedTrainerConfig

from gcore_core.contract.errors import ContractError
from tests.support import sleeping_ranks
from tests.support.deepspeed_trainers import SHARED_OUT
from tests.support.language_models import Clip, make_advantages, make_context, make_records

pytestmark = pytest.mark.engine

#: Numbers of a bucket that gradients are reduced in; few, since pages are counted here.
BUCKET = 1 << 18
#: What fills pages beside weights and moments, as a share of them: ends of tensors, sums.
_BESIDE = 0.03

#: name -> (family, settings)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("qwen2", {"stage": 1}),
    "zero2": ("llama", {"stage": 2, "dtype": "bfloat16"}),
    "zero3": ("qwen2", {"stage": 3}),
    "zero2-offload": ("qwen2", {"stage": 2, "offload_optimizer": True}),
    "zero3-offload": ("llama", {"stage": 3, "offload_optimizer": True, "offload_params": True}),
    "zero3-universal": ("llama", {"stage": 3, "checkpoint": "universal"}),
    "zero2-adapter": ("llama", {"stage": 2, "lora": {"rank": 2, "alpha": 8.0}}),
    "zero3-adapter": ("llama", {"stage": 3, "lora": {"rank": 2, "alpha": 8.0}}),
}


@pytest.fixture(scope="module")
def found(
    model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Any]]:
    """What two ranks found without sleep and with it; the same processes run all layouts."""
    cases = []
    for family, settings in LAYOUTS.values():
        engine = SHARED_OUT if settings["stage"] == 3 else {}
        case = sleeping_ranks.case_of("deepspeed", model_dirs[family], engine=engine, **settings)
        cases.append(case)
    pairs = sleeping_ranks.found_by(cases, tmp_path_factory.mktemp("sleeping"))
    return dict(zip(LAYOUTS, pairs, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_bits_of_a_run_without_sleep(
    layout: str, found: dict[str, tuple[Any, Any]]
) -> None:
    without, slept = found[layout]
    assert slept == without


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return sleeping_ranks.save_large(tmp_path / "large")


@pytest.fixture
def open_trainer(tmp_path: Path) -> Any:
    """Makes a trainer, and closes it after the test."""
    from gcore_deepspeed.trainer import DeepSpeedTrainer

    trainers = []

    def make(model: Path, **settings: Any) -> Any:
        engine = SHARED_OUT if settings.get("stage") == 3 else {}
        context = make_context(model, Clip(beta=0.1), engine=engine, directory=str(tmp_path))
        trainers.append(DeepSpeedTrainer(DeepSpeedTrainerConfig(**settings), context))
        return trainers[-1]

    yield make
    for trainer in reversed(trainers):
        trainer.close()


@pytest.mark.parametrize(
    ("settings", "held", "mapped"),
    [
        # weights, the optimizer's weights and moments, reference
        ({"stage": 1}, 4 + 4 + 8 + 4, 4),
        ({"stage": 2}, 4 + 4 + 8 + 4, 4),
        # and a buffer of gradients
        ({"stage": 3}, 4 + 4 + 8 + 4 + 4, 0),
        # and what gradients are added up in, too
        ({"stage": 2, "offload_optimizer": True}, 4 + 4 + 8 + 4 + 4 + 4, 4),
        (
            {"stage": 3, "offload_optimizer": True, "offload_params": True},
            4 + 4 + 8 + 4 + 4 + 4,
            0,
        ),
    ],
    ids=["zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"],
)
def test_a_rank_that_sleeps_gives_back_all_that_it_holds(
    settings: dict[str, Any],
    held: int,
    mapped: int,
    large: Path,
    open_trainer: Any,
    tmp_path: Path,
) -> None:
    """By the pages of tensors, and of the process.

    held: bytes of each parameter.
    mapped: bytes of each parameter that lie in the model's file, which the system may take at any
        time.
    """
    trainer = open_trainer(large, bucket_elements=BUCKET, **settings)
    parameters = sum(spec.nbytes // 4 for spec in trainer.weight_specs())
    records = make_records(groups=1)
    trainer.prepare(records, frozenset())
    trainer.train(0, make_advantages(records), 1, 1)
    awake = sleeping_ranks.anonymous_bytes()
    beside = _BESIDE * held * parameters
    assert trainer.memory_bytes > held * parameters
    trainer.sleep()
    assert trainer.memory_bytes < mapped * parameters + beside
    assert awake - sleeping_ranks.anonymous_bytes() > (held - mapped) * parameters - beside
    trainer.wake()
    assert not list(tmp_path.glob("asleep-*"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whatever_needs_the_weights_is_refused_asleep(
    stage: int, model_dirs: dict[str, Path], open_trainer: Any, tmp_path: Path
) -> None:
    """And is possible again after the wake, with what was there before."""
    trainer = open_trainer(model_dirs["qwen2"], stage=stage, **sleeping_ranks.SETTINGS)
    records = make_records(groups=2)
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
        "adapter": lambda: list(trainer.export_adapter()),
        "save": lambda: trainer.save(tmp_path / "state"),
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
    trainer.train(0, make_advantages(records), 1, 1)
    assert not (tmp_path / "state").exists()
