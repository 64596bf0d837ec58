"""Generators that go on behind given tokens, with one fault each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from gcore_testing import TokensContract, fake
from gcore_testing.fake import FakeGenerator

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, WeightPlan
from tests.support.fake_generators import OfBackend

_CONTEXT = 40


class Reading(FakeGenerator):
    """Its letters depend on the last token that it has read, and it has a short context."""

    def __init__(self, config: fake.FakeGeneratorConfig, context: WorkerContext) -> None:
        super().__init__(config, context)
        self.context_length = _CONTEXT
        self._refused: list[Finished] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        fitting = []
        for request in requests:
            if len(self._read(request)) < self.context_length:
                fitting.append(request)
                continue
            versions = (self.version, self.version)
            self._refused.append(
                Finished(
                    request=request, status=FAILED, versions=versions, reason="prompt_too_long"
                )
            )
        super().submit(fitting)

    def step(self) -> list[Finished]:
        refused, self._refused = self._refused, []
        return refused + super().step()

    def _read(self, request: SampleRequest) -> list[int]:
        """Returns the tokens of a request's prompt."""
        if request.ids is not None:
            return [int(token) for token in request.ids]
        return self.tokenizer.encode(request.prompt.text or "")

    def _draw(self, request: SampleRequest, position: int) -> int:
        if not request.greedy:
            return super()._draw(request, position)
        # Letters in turn, from the likeliest on: where it is depends on all that was read.
        return int(self._logits[:-1].argmax() + self._place(request) + position) % fake.END

    def _place(self, request: SampleRequest) -> int:
        prompt = self._read(request)
        return len(prompt)


class CleanTokens(OfBackend, TokensContract):
    Backend: ClassVar[type[FakeGenerator]] = Reading


_TURNS = "test_an_answer_in_turns_is_one_long_answer"
_PUSH = "test_turns_behind_a_push_are_of_the_new_weights"


class EncodesThePromptAnyway(CleanTokens):
    caught_by = (
        "test_given_tokens_are_read_as_they_are",
        _TURNS,
        _PUSH,
        "test_a_limit_ends_its_own_request_alone",
        "test_a_text_ends_its_own_request_alone",
        "test_tokens_beyond_the_context_fail_alone",
    )

    class Backend(Reading):
        def submit(self, requests: Sequence[SampleRequest]) -> None:
            super().submit([replace(request, ids=None) for request in requests])


class EncodesTheirTextAgain(CleanTokens):
    caught_by = ("test_given_tokens_are_read_as_they_are",)

    class Backend(Reading):
        """Takes given tokens through their text: those that no text has are others then."""

        def submit(self, requests: Sequence[SampleRequest]) -> None:
            super().submit([self._again(request) for request in requests])

        def _again(self, request: SampleRequest) -> SampleRequest:
            if request.ids is None:
                return request
            ids = request.ids.copy()
            ids[ids < ord(" ")] = ord("?")
            return replace(request, ids=ids)


class IgnoresTheLimit(CleanTokens):
    caught_by = ("test_a_limit_ends_its_own_request_alone", _TURNS, _PUSH)

    class Backend(Reading):
        def submit(self, requests: Sequence[SampleRequest]) -> None:
            super().submit([replace(request, most=0) for request in requests])


class IgnoresTheStop(CleanTokens):
    caught_by = ("test_a_text_ends_its_own_request_alone",)

    class Backend(Reading):
        def submit(self, requests: Sequence[SampleRequest]) -> None:
            super().submit([replace(request, stop=()) for request in requests])


class SeedsByPlace(CleanTokens):
    caught_by = ("test_the_seed_decides_what_follows_given_tokens",)

    class Backend(Reading):
        def submit(self, requests: Sequence[SampleRequest]) -> None:
            super().submit([replace(one, seed=one.seed ^ one.ordinal) for one in requests])


class KeepsWhatOlderWeightsRead(CleanTokens):
    caught_by = (_PUSH,)

    class Backend(Reading):
        """Goes on under the weights under which a conversation's first turn was drawn."""

        def commit_weights(self, plan: WeightPlan) -> None:
            older = self._logits.copy()
            super().commit_weights(plan)
            self._older = older

        def _table(self, greedy: bool) -> np.ndarray:
            if getattr(self, "_given", False) and hasattr(self, "_older"):
                return fake.log_softmax(self._older / self._temperature(greedy))
            return super()._table(greedy)

        def _draw(self, request: SampleRequest, position: int) -> int:
            self._given = request.ids is not None
            return super()._draw(request, position)


class SaysAnotherEnd(CleanTokens):
    caught_by = ("test_it_tells_how_it_writes",)

    class Backend(Reading):
        def __init__(self, config: fake.FakeGeneratorConfig, context: WorkerContext) -> None:
            super().__init__(config, context)
            self.end_ids = frozenset({0})


class FailsWithOthers(CleanTokens):
    caught_by = ("test_tokens_beyond_the_context_fail_alone",)

    class Backend(Reading):
        def submit(self, requests: Sequence[SampleRequest]) -> None:
            super().submit(requests)
            if self._refused:
                self._refused += [
                    Finished(
                        request=request,
                        status=FAILED,
                        versions=(self.version, self.version),
                        reason="prompt_too_long",
                    )
                    for request, _ in self._running.values()
                ]
                self._running.clear()
