"""The public contracts hold for the plugin: what ``g-core conformance vllm`` runs, and beside it a
trainer on torch.
"""

from __future__ import annotations

from typing import Any

import pytest
from gcore_testing import PluginContract, TrainerWithGeneratorContract
from gcore_vllm import conformance


class TestPlugin(PluginContract):
    provider = "vllm"


@pytest.mark.engine
class TestLlamaGenerator(conformance.TestLlamaGenerator):
    pass


@pytest.mark.engine
@pytest.mark.slow
class TestQwen2Generator(conformance.TestQwen2Generator):
    pass


@pytest.mark.engine
@pytest.mark.slow
class TestQwen2VLGenerator(conformance.TestQwen2VLGenerator):
    pass


@pytest.mark.engine
class TestTokens(conformance.TestTokens):
    pass


@pytest.mark.engine
class TestSleepingGenerator(conformance.TestSleepingGenerator):
    pass


@pytest.mark.engine
class TestTorchTrainerWithGenerator(TrainerWithGeneratorContract):
    """On a model with tied embeddings, whose tensor two layers of vLLM share."""

    provider = "torch"
    generator_provider = "vllm"
    # eps about as large as gradients are: else Adam makes whole steps of the rounding of gradients
    # that should be zero
    config = {"learning_rate": 1e-3, "eps": 1e-2}
    generator_config = {"max_new_tokens": 8, "kv_cache_gib": 0.05, "temperature": 0.7}

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        from gcore_language.tiny import save_model

        directory = tmp_path_factory.mktemp("qwen2")
        save_model(directory, "qwen2")
        return {"path": str(directory)}
