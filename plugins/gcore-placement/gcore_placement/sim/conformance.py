"""The contracts that hold the emulated backends to what they claim; no time is spent in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from gcore_testing import (
    DatasetContract,
    GeneratorContract,
    LauncherContract,
    ScorerContract,
    TrainerContract,
    TrainerWithGeneratorContract,
)
from gcore_testing.contracts.scorer import Waited
from gcore_testing.safetensors_files import Tensors

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import FINISHED
from gcore_placement.sim.policy import LETTERS, initial_table, tensors_of


class TestGenerator(GeneratorContract):
    provider = "sim"
    config = {"time_scale": 0.0, "tick_s": 0.03}  # prompts, and at least one token
    tolerance = 0.0

    @pytest.fixture
    def weights(self) -> Tensors:
        return list(tensors_of(initial_table()))

    @pytest.fixture
    def memory(self, generator: Any) -> Callable[[], int]:
        """Returns a function that returns the emulated bytes on the emulated device."""
        return lambda: generator.memory_bytes

    @pytest.fixture
    def end_tokens(self) -> frozenset[int]:
        return frozenset({len(LETTERS) - 1})


class TestTrainer(TrainerContract):
    provider = "sim"
    config = {"time_scale": 0.0, "learning_rate": 5.0}
    micro_batches = {"micro_batch": 1}


class TestTrainerWithGenerator(TrainerWithGeneratorContract):
    provider = "sim"
    config = {"time_scale": 0.0, "learning_rate": 5.0}
    generator_config = {"time_scale": 0.0}
    tolerance = 0.0


class TestJudge(ScorerContract):
    provider = "sim/judge"
    config = {"time_scale": 0.0}


class _Silent:
    """A sampler whose answers say nothing."""

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        return [[Answer(text="", status=FINISHED)] * question.samples for question in questions]


class TestAsks(ScorerContract):
    provider = "sim/asks"

    @pytest.fixture
    def scorer(self, context: WorkerContext) -> Iterator[Any]:
        loop = asyncio.new_event_loop()
        yield Waited(self.build(replace(context, sampler=_Silent())), loop)
        loop.close()


class TestPrompts(DatasetContract):
    provider = "sim/prompts"


class TestSkewedPrompts(DatasetContract):
    provider = "sim/prompts"
    config = {"rows": 1000, "skew": {"shards": 8}}


class TestCrowd(LauncherContract):
    provider = "sim/crowd"


class TestInline(LauncherContract):
    provider = "sim/inline"
