"""Holds the generator to its contract on tiny random models, for ``g-core conformance sglang``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from gcore_language.engine_contract import (
    OnCuda,
    OnQwen2,
    OnQwen2VL,
    OnTinyModel,
    TokensOnTinyModel,
)

from gcore_sglang import stepwise


class OnSglang(OnTinyModel):
    provider = "sglang"
    library = "sglang"
    # Fewer at once than a test asks for: some samples wait when a push or an abort comes.
    config = {"max_new_tokens": 32, "max_batch": 16}
    returns_late = True
    samples = (
        12  # without seeds, two samples of a prompt begin alike only by chance: enough of them do
    )

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _gate(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gcore_sglang.server.CHILD", stepwise.__name__)
            yield

    def held(self, generator: Any) -> AbstractContextManager[None]:
        return stepwise.held(generator)


class TestLlamaGenerator(OnSglang):
    pass


class TestQwen2Generator(OnSglang, OnQwen2):
    """Another temperature, where log-probs before and after it differ."""

    config = {**OnSglang.config, "temperature": 0.7}


class TestQwen2VLGenerator(OnSglang, OnQwen2VL):
    patch = 14  # SGLang knows no other


class TestTokens(TokensOnTinyModel):
    provider = "sglang"
    library = "sglang"
    config = {**OnSglang.config, "context_length": 256}


class TestDeterministicGenerator(OnSglang):
    """All prompts read together, and one by one: bits are compared."""

    provider = "sglang/deterministic"
    config = {**OnSglang.config, "max_batch": 8}
    samples = 6


class TestSleepingGenerator(OnSglang, OnCuda):
    """Runs where CUDA is."""

    provider = "sglang/sleeping"
