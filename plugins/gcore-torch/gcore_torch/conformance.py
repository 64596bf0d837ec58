"""Holds trainer and generator to their contracts, for ``g-core conformance torch``.

The models are tiny and random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gcore_language.tiny import save_image_model, save_model
from gcore_testing import (
    GeneratorContract,
    TokensContract,
    TrainerContract,
    TrainerWithGeneratorContract,
)

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt

# eps about as large as gradients are: else Adam makes whole steps of the rounding of gradients that
# should be zero
_TRAINER = {"learning_rate": 1e-3, "eps": 1e-2}
_GENERATOR = {"max_new_tokens": 8}
_ADAPTER = {"lora": {"rank": 2, "alpha": 8.0}, "learning_rate": 1e-2}


class OnLlama:
    """Has a model of the Llama family."""

    family = "llama"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        directory = tmp_path_factory.mktemp(cls.family)
        save_model(directory, cls.family)
        return {"path": str(directory)}


class OnQwen2(OnLlama):
    """Has a model with grouped heads, biases and tied embeddings."""

    family = "qwen2"


class OnQwen3Moe(OnLlama):
    """Has a mixture of experts."""

    family = "qwen3_moe"


class OnQwen2VL(OnLlama):
    """Has a model that takes images, and prompts that show some."""

    family = "qwen2_vl"

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        pytest.importorskip("PIL", reason="needs gcore-torch[images]")
        directory = tmp_path_factory.mktemp(cls.family)
        save_image_model(directory, cls.family)
        return {"path": str(directory)}

    @pytest.fixture
    def prompts(self, tmp_path: Path) -> list[Prompt]:
        from PIL import Image

        prompts = [Prompt(row=0, text="1+2=")]
        for row, size in enumerate(((16, 24), (24, 16), (32, 32)), 1):
            file = tmp_path / f"{row}.png"
            Image.effect_noise(size, 100).convert("RGB").save(file)
            text = "<|vision_start|><|image_pad|><|vision_end|>1+2="
            prompts.append(Prompt(row=row, text=text, images=[str(file)]))
        return prompts


class OnDevice(GeneratorContract):
    """Says how much memory the generator takes."""

    provider = "torch"
    returns_late = True  # a deterministic one holds samples back until none run

    @pytest.fixture
    def memory(self, generator: Any) -> Callable[[], int]:
        """Returns a function that returns the bytes of weights and cache.

        On a CPU, as tests are run, a sleep frees the cache alone.
        """
        return lambda: generator.memory_bytes

    @pytest.fixture
    def expert_generator(self, context: WorkerContext, tmp_path: Path) -> Iterator[Any]:
        """Gives a generator of a mixture of experts, whatever model the others have."""
        save_model(tmp_path / "experts", "qwen3_moe")
        model = {"path": str(tmp_path / "experts")}
        generator = self.build(replace(context, model=model))
        yield generator
        generator.close()


class TestLlamaGenerator(OnLlama, OnDevice):
    config = _GENERATOR


class TestQwen2Generator(OnQwen2, OnDevice):
    config = {**_GENERATOR, "temperature": 0.7}


class TestQwen3MoeGenerator(OnQwen3Moe, OnDevice):
    config = _GENERATOR

    def test_sleep_gives_memory_back(  # type: ignore[override]
        self, context: WorkerContext, requests: list[SampleRequest]
    ) -> None:
        """Its decoder holds no cache between requests, so a sleep can drop the weights alone."""
        generator = self.build(context, sleep="discard")
        self.run(generator, requests)
        awake = generator.memory_bytes
        generator.sleep()
        assert generator.memory_bytes < awake
        generator.close()


class TestLlamaTokens(OnLlama, TokensContract):
    provider = "torch"
    config = _GENERATOR


class TestQwen2Tokens(OnQwen2, TokensContract):
    provider = "torch"
    config = {**_GENERATOR, "temperature": 0.7, "context_length": 64}


class SleepingTrainer(TrainerContract):
    """Says how much memory the trainer takes, awake and asleep."""

    @pytest.fixture
    def memory_of(self) -> Callable[[Any], int]:
        return lambda trainer: trainer.memory_bytes


class TestLlamaTrainer(OnLlama, SleepingTrainer):
    provider = "torch"
    config = _TRAINER
    adapter_config = _ADAPTER
    micro_batches = {"budget_tokens": 1}


class TestQwen2Trainer(OnQwen2, SleepingTrainer):
    provider = "torch"
    config = _TRAINER
    adapter_config = _ADAPTER
    micro_batches = {"budget_tokens": 1}


class TestLlamaTrainerWithGenerator(OnLlama, TrainerWithGeneratorContract):
    provider = "torch"
    config = _TRAINER
    adapter_config = _ADAPTER
    generator_config = _GENERATOR


class TestQwen2TrainerWithGenerator(OnQwen2, TrainerWithGeneratorContract):
    provider = "torch"
    config = _TRAINER
    adapter_config = _ADAPTER
    generator_config = {**_GENERATOR, "temperature": 0.7}


class TestQwen3MoeTrainerWithGenerator(OnQwen3Moe, TrainerWithGeneratorContract):
    provider = "torch"
    config = {**_TRAINER, "router_replay": "always"}
    adapter_config = _ADAPTER
    generator_config = _GENERATOR


class TestQwen2VLTrainerWithGenerator(OnQwen2VL, TrainerWithGeneratorContract):
    provider = "torch"
    config = _TRAINER
    generator_config = _GENERATOR
