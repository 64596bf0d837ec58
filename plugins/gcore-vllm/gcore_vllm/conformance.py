"""What ``g-core conformance vllm`` runs: the contract of a generator on tiny random models, with the real engine.

An engine takes seconds to start, so the tests of a class share one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gcore_core.protocols import WorkerContext
from gcore_core.testing import GeneratorContract
from gcore_core.testing.contracts.base import closing, make


class OnTinyModel(GeneratorContract):
    provider = "vllm"
    config = {"max_new_tokens": 8, "kv_cache_gib": 0.05}
    family = "llama"
    needs_cuda = False

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed here")
        from gcore_language.testing import has_cuda
        from gcore_language.tiny import save_model

        if cls.needs_cuda and not has_cuda():
            pytest.skip("there is no CUDA here")
        directory = tmp_path_factory.mktemp(cls.family)
        save_model(directory, cls.family)
        return {"path": str(directory)}

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model: dict[str, str]) -> Iterator[Any]:
        yield from closing(make(cls.description(), cls.config, WorkerContext(role="contract", model=model)))

    @pytest.fixture
    def generator(self, engine: Any) -> Iterator[Any]:
        yield engine
        engine.abort([(ordinal, sample) for ordinal in range(1001) for sample in range(self.samples)])


class TestLlamaGenerator(OnTinyModel):
    pass


class TestQwen2Generator(OnTinyModel):
    """Grouped heads, biases, tied embeddings; another temperature, where log-probs before and after it differ."""

    family = "qwen2"
    config = {**OnTinyModel.config, "temperature": 0.7}


class TestSleepingGenerator(OnTinyModel):
    """Runs where CUDA is."""

    provider = "vllm/sleeping"
    needs_cuda = True

    @pytest.fixture
    def memory(self) -> Callable[[], int]:
        from gcore_language.testing import used_on_device

        return used_on_device
