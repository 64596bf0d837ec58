"""The public contracts hold: what ``g-core conformance sglang`` runs, and beside it a trainer on
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gcore_sglang import conformance
from gcore_testing import PluginContract, TrainerWithGeneratorContract
from gcore_testing.contracts.base import closing, make
from gcore_testing.contracts.weights import push, read_model

from gcore_core.contract.context import WorkerContext


class TestPlugin(PluginContract):
    provider = "sglang"


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
@pytest.mark.slow
class TestDeterministicGenerator(conformance.TestDeterministicGenerator):
    pass


@pytest.mark.engine
class TestTokens(conformance.TestTokens):
    pass


@pytest.mark.engine
class TestSleepingGenerator(conformance.TestSleepingGenerator):
    pass


@pytest.mark.engine
@pytest.mark.slow
class TestTorchTrainerWithGenerator(TrainerWithGeneratorContract):
    """On a model with tied embeddings, whose tensor two layers of SGLang share; all tests with one
    server.
    """

    provider = "torch"
    # eps about as large as gradients are: else Adam makes whole steps of the rounding of gradients
    # that should be zero
    config = {"learning_rate": 1e-3, "eps": 1e-2}

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        from gcore_language.tiny import save_model

        directory = tmp_path_factory.mktemp("qwen2")
        save_model(directory, "qwen2")
        return {"path": str(directory)}

    @pytest.fixture(scope="class")
    @classmethod
    def engine(
        cls, model: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Any]:
        context = WorkerContext(
            role="rollout", model=model, directory=str(tmp_path_factory.mktemp("logs"))
        )
        of = conformance.TestQwen2Generator
        yield from closing(make(of.description(), of.config, context))

    @pytest.fixture
    def generator(self, engine: Any, model: dict[str, Any]) -> Iterator[Any]:
        """As it was when it started."""
        engine._inbox.version = 0
        push(engine, read_model(model), 0)
        yield engine
