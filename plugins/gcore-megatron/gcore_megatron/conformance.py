"""What ``g-core conformance megatron`` runs: the contract of a trainer on tiny random models, with
the real library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from gcore_testing import TrainerContract


class OnTinyModel(TrainerContract):
    provider = "megatron"
    # eps about as large as gradients are: else Adam makes whole steps of the rounding of gradients
    # that should be zero
    config = {"learning_rate": 1e-3, "eps": 1e-2}
    micro_batches = {"budget_tokens": 1}
    family = "llama"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        if importlib.util.find_spec("megatron") is None:
            pytest.skip("Megatron-Core is not installed here")
        from gcore_language.tiny import save_model

        directory = tmp_path_factory.mktemp(cls.family)
        save_model(directory, cls.family)
        return {"path": str(directory)}

    @pytest.fixture
    def memory_of(self) -> Callable[[Any], int]:
        return lambda trainer: trainer.memory_bytes


class TestLlamaTrainer(OnTinyModel):
    pass


class TestQwen2Trainer(OnTinyModel):
    """Grouped heads, biases, tied embeddings."""

    family = "qwen2"


class TestQwen3MoeTrainer(OnTinyModel):
    """A mixture of experts."""

    family = "qwen3_moe"
