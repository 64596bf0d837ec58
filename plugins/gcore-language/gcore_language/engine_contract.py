"""Holds what conformance modules of engines share: a generator's contract on tiny random models.

It runs with the real engine. An engine takes seconds to start, so the tests of a class share one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gcore_testing import Contract, GeneratorContract, TokensContract
from gcore_testing.contracts.base import closing, make
from gcore_testing.safetensors_files import Tensors

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.order import FIRST_TURN
from gcore_core.contract.records import Prompt


class TinyModel(Contract):
    """Has an engine with a tiny Llama.

    library: the engine's module; where it is not installed all tests are skipped.
    """

    library: ClassVar[str]
    family: ClassVar[str] = "llama"
    needs_cuda: ClassVar[bool] = False

    @classmethod
    def save(cls, directory: Path) -> None:
        """Writes the model into the directory."""
        from gcore_language.tiny import save_model

        save_model(directory, cls.family)

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        if importlib.util.find_spec(cls.library) is None:
            pytest.skip(f"{cls.library} is not installed here")
        from gcore_language.testing import has_cuda

        if cls.needs_cuda and not has_cuda():
            pytest.skip("there is no CUDA here")
        directory = tmp_path_factory.mktemp(cls.family)
        cls.save(directory)
        return {"path": str(directory)}

    @pytest.fixture(scope="class")
    @classmethod
    def engine(
        cls, model: dict[str, str], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Any]:
        context = WorkerContext(
            role="contract",
            model=model,
            directory=str(tmp_path_factory.mktemp("logs")),
            acts=issubclass(cls, TokensContract),
        )
        yield from closing(make(cls.description(), cls.config, context))


class TokensOnTinyModel(TinyModel, TokensContract):
    """The contract of an engine that goes on behind given tokens."""

    @pytest.fixture
    def generator(self, engine: Any) -> Iterator[Any]:
        yield engine
        engine.abort([(FIRST_TURN + place, sample) for place in range(1000) for sample in (0, 1)])


class OnTinyModel(TinyModel, GeneratorContract):
    """A generator's contract on a tiny Llama."""

    @pytest.fixture
    def generator(self, engine: Any) -> Iterator[Any]:
        yield engine
        engine.abort(
            [(ordinal, sample) for ordinal in range(1001) for sample in range(self.samples)]
        )


class OnQwen2(OnTinyModel):
    """A tiny Qwen2: grouped heads, biases and tied embeddings."""

    family = "qwen2"


class OnQwen2VL(OnTinyModel):
    """A tiny Qwen2-VL, which takes images, and prompts that show some.

    patch: side of a patch in pixels.
    """

    family = "qwen2_vl"
    patch: ClassVar[int] = 4

    @classmethod
    def save(cls, directory: Path) -> None:
        from gcore_language.tiny import save_image_model

        save_image_model(directory, cls.family, patch=cls.patch)

    @pytest.fixture
    def prompts(self, tmp_path: Path) -> list[Prompt]:
        from gcore_language.testing import image_prompts

        return image_prompts(tmp_path, self.patch)

    @pytest.fixture
    def weights(self, model: dict[str, str]) -> Tensors:
        """Gives the weights under the names by which trainers push them, which are not those in the
        files.
        """
        from gcore_language.testing import tensors_of

        return tensors_of(Path(model["path"]))


class OnCuda(OnTinyModel):
    """The contract with sleep, which engines have on CUDA alone."""

    needs_cuda = True

    @pytest.fixture
    def memory(self) -> Callable[[], int]:
        from gcore_language.testing import used_on_device

        return used_on_device
