"""What ``g-core conformance sglang`` runs: the contract of a generator on tiny random models, with the real engine.

SGLang takes half a minute to start, so the tests of a class share one server.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gcore_core.protocols import SampleRequest, WorkerContext
from gcore_core.testing import GeneratorContract
from gcore_core.testing.contracts.base import claims
from gcore_core.testing.contracts.weights import perturbed, push
from gcore_core.testing.safetensors_files import Tensors


class OnTinyModel(GeneratorContract):
    provider = "sglang"
    # Few at once, or all would have ended before a test has made its second step: SGLang does not wait for steps.
    config = {"max_new_tokens": 32, "max_batch": 4}
    family = "llama"
    samples = 12  # without seeds, two samples of a prompt begin alike only by chance: enough of them do

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        if importlib.util.find_spec("sglang") is None:
            pytest.skip("SGLang is not installed here")
        from gcore_language.tiny import save_model

        directory = tmp_path_factory.mktemp(cls.family)
        save_model(directory, cls.family)
        return {"path": str(directory)}

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        yield from started(cls.config, model, str(tmp_path_factory.mktemp("logs")))

    @pytest.fixture
    def generator(self, engine: Any) -> Iterator[Any]:
        yield engine
        engine.abort([(ordinal, sample) for ordinal in range(1001) for sample in range(self.samples)])

    @claims("weights.push")
    def test_samples_that_run_through_a_push_say_so(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """As the contract has it, but that a sample may end between the last step and the push, and be given after."""
        before = generator.version
        generator.submit(requests)
        ended = [record for _ in range(2) for record in generator.step()]
        push(generator, perturbed(weights), before + 1)
        told = {record.versions for record in self.drain(generator, requests, ended)}
        assert {record.versions for record in ended} <= {(before, before)}
        assert (before, before + 1) in told, "no sample says that older weights began it"
        assert told <= {(before, before), (before, before + 1), (before + 1, before + 1)}


def started(config: Mapping[str, Any], model: Mapping[str, Any], directory: str) -> Iterator[Any]:
    """A generator, closed in the end."""
    from gcore_sglang.config import SglangGeneratorConfig
    from gcore_sglang.engine import SglangGenerator

    context = WorkerContext(role="contract", model=model, directory=directory)
    made = SglangGenerator(SglangGeneratorConfig(**config), context)
    yield made
    made.close()


class TestLlamaGenerator(OnTinyModel):
    pass


class TestQwen2Generator(OnTinyModel):
    """Grouped heads, biases, tied embeddings; another temperature, where log-probs before and after it differ."""

    family = "qwen2"
    config = {**OnTinyModel.config, "temperature": 0.7}
