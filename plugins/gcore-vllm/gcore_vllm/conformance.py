"""Holds the generator to its contract on tiny random models, for ``g-core conformance vllm``.

It uses the real engine.
"""

from __future__ import annotations

from gcore_language.engine_contract import (
    OnCuda,
    OnQwen2,
    OnQwen2VL,
    OnTinyModel,
    TokensOnTinyModel,
)


class OnVllm(OnTinyModel):
    provider = "vllm"
    library = "vllm"
    config = {"max_new_tokens": 8, "kv_cache_gib": 0.05}


class TestLlamaGenerator(OnVllm):
    pass


class TestQwen2Generator(OnVllm, OnQwen2):
    """Another temperature, where log-probs before and after it differ."""

    config = {**OnVllm.config, "temperature": 0.7}


class TestQwen2VLGenerator(OnVllm, OnQwen2VL):
    pass


class TestTokens(TokensOnTinyModel):
    provider = "vllm"
    library = "vllm"
    config = {**OnVllm.config, "context_length": 256}


class TestSleepingGenerator(OnVllm, OnCuda):
    """Runs where CUDA is."""

    provider = "vllm/sleeping"
