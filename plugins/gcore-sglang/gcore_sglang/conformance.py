"""Holds the generator to its contract on tiny random models, for ``g-core conformance sglang``."""

from __future__ import annotations

from gcore_language.engine_contract import OnCuda, OnQwen2, OnQwen2VL, OnTinyModel


class OnSglang(OnTinyModel):
    provider = "sglang"
    library = "sglang"
    # Few at once, or all would have ended before a test has made its second step: SGLang does not
    # wait for steps.
    config = {"max_new_tokens": 32, "max_batch": 2}
    returns_late = True
    samples = (
        12  # without seeds, two samples of a prompt begin alike only by chance: enough of them do
    )


class TestLlamaGenerator(OnSglang):
    pass


class TestQwen2Generator(OnSglang, OnQwen2):
    """Another temperature, where log-probs before and after it differ."""

    config = {**OnSglang.config, "temperature": 0.7}


class TestQwen2VLGenerator(OnSglang, OnQwen2VL):
    patch = 14  # SGLang knows no other


class TestDeterministicGenerator(OnSglang):
    """All prompts read together, and one by one: bits are compared."""

    provider = "sglang/deterministic"
    config = {**OnSglang.config, "max_batch": 8}
    samples = 6


class TestSleepingGenerator(OnSglang, OnCuda):
    """Runs where CUDA is."""

    provider = "sglang/sleeping"
