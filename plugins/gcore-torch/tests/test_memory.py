"""What the trainer and the generator say of their memory before they start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_language.lora_settings import LoraSettings
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.memory import generator_memory, trainer_memory

from gcore_core.contract.memory import ASLEEP, MemoryNeed, WorkerShape
from tests.support.known_models import KNOWN

MODEL = KNOWN[0]  # Qwen2.5-0.5B


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL.config))
    return str(tmp_path)


def worker(path: str, **words: Any) -> WorkerShape:
    return WorkerShape(role="policy", model={"path": path}, **words)


def of(needs: list[MemoryNeed], what: str, phase: str) -> int | None:
    return next((need.nbytes for need in needs if (need.what, need.phase) == (what, phase)), None)


def test_gradients_are_held_in_training_alone_and_a_reference_only_where_it_is_asked_for(
    path: str,
) -> None:
    plain = list(trainer_memory(TorchTrainerConfig(), worker(path)))
    assert of(plain, "gradients", "training") == 4 * MODEL.parameters
    assert of(plain, "gradients", "rollout") is None
    assert of(plain, "reference", "training") is None
    asked = worker(path, requires=frozenset({"ref_logp"}))
    assert of(list(trainer_memory(TorchTrainerConfig(), asked)), "reference", "training")
    given = worker(path, requires=frozenset({"ref_logp"}), given=frozenset({"ref_logp"}))
    assert of(list(trainer_memory(TorchTrainerConfig(), given)), "reference", "training") is None


def test_a_deterministic_run_also_holds_exact_sums(path: str) -> None:
    needs = list(trainer_memory(TorchTrainerConfig(), worker(path, deterministic=True)))
    assert of(needs, "exact sums", "training") == 20 * MODEL.parameters


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TorchTrainerConfig(lora=LoraSettings(rank=8)), {}),
        (TorchTrainerConfig(), {"requires": frozenset({"values"})}),
    ],
)
def test_what_was_never_counted_is_unknown_and_not_zero(
    path: str, config: TorchTrainerConfig, words: dict[str, Any]
) -> None:
    needs = list(trainer_memory(config, worker(path, **words)))
    assert {need.nbytes for need in needs} == {None}
    assert all(need.note for need in needs)


@pytest.mark.parametrize(("sleep", "kept"), [("keep", 2 * MODEL.parameters), ("discard", 0)])
def test_a_generator_that_sleeps_keeps_on_the_host_what_its_setting_says(
    path: str, sleep: Any, kept: int
) -> None:
    config = TorchGeneratorConfig(dtype="bfloat16", sleep=sleep)
    needs = list(generator_memory(config, worker(path)))
    assert of(needs, "weights", "rollout") == 2 * MODEL.parameters
    (asleep,) = [need for need in needs if need.phase == ASLEEP]
    assert (asleep.on, asleep.nbytes) == ("host", kept)


def test_the_cache_has_keys_and_values_of_each_layer_for_each_token_of_each_sample(
    path: str,
) -> None:
    config = TorchGeneratorConfig(max_batch=4, context_length=1024, dtype="bfloat16")
    needs = list(generator_memory(config, worker(path)))
    # 24 layers, 2 key-value heads of 64, keys and values, 2 bytes; grown by half
    assert of(needs, "key-value cache", "rollout") == 24 * 2 * 64 * 2 * 2 * 4 * 1536
