"""What ``g-core conformance deepspeed`` runs: the contract of a trainer on tiny random models, with
real DeepSpeed, and where gcore-torch is installed that of a trainer together with its generator.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from gcore_testing import TrainerContract, TrainerWithGeneratorContract

#: eps about as large as gradients are: else Adam makes whole steps of the rounding of gradients
#: that should be zero
_TRAINER = {"learning_rate": 1e-3, "eps": 1e-2}
_ADAPTER = {"lora": {"rank": 2, "alpha": 8.0}, "learning_rate": 1e-2}


class OnLlama:
    family = "llama"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed here")
        from gcore_language.tiny import save_model

        directory = tmp_path_factory.mktemp(cls.family)
        save_model(directory, cls.family)
        return {"path": str(directory)}

    @pytest.fixture
    def memory_of(self) -> Callable[[Any], int]:
        return lambda trainer: trainer.memory_bytes


class OnQwen2(OnLlama):
    """Grouped heads, biases, tied embeddings."""

    family = "qwen2"


class TestLlamaTrainer(OnLlama, TrainerContract):
    """ZeRO 2."""

    provider = "deepspeed"
    config = _TRAINER
    adapter_config = _ADAPTER
    micro_batches = {"budget_tokens": 1}


class TestQwen2Trainer(OnQwen2, TrainerContract):
    """ZeRO 3."""

    provider = "deepspeed"
    config = {**_TRAINER, "stage": 3}
    adapter_config = _ADAPTER
    micro_batches = {"budget_tokens": 1}


class TestQwen2TrainerWithGenerator(OnQwen2, TrainerWithGeneratorContract):
    provider = "deepspeed"
    generator_provider = "torch"
    config = {**_TRAINER, "stage": 3}
    adapter_config = _ADAPTER
    generator_config = {"max_new_tokens": 8, "temperature": 0.7}

    @pytest.fixture(autouse=True)
    def _needs_a_generator(self) -> None:
        if importlib.util.find_spec("gcore_torch") is None:
            pytest.skip("gcore-torch is not installed here")
