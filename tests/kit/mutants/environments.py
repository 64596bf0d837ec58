"""Environments with one fault each."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from gcore_testing import EnvironmentContract
from gcore_testing.fake_environment import Episode, FakeEnvironment

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, Generator, SampleRequest
from gcore_core.contract.order import FIRST_QUESTION
from gcore_core.contract.providers import EnvironmentProvider

_PROVIDER = EnvironmentProvider(
    summary="nods between two turns",
    factory="gcore_testing.fake_environment:FakeEnvironment",
    columns=("turn",),
)


class CleanEnvironment(EnvironmentContract):
    provider = _PROVIDER
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeEnvironment]] = FakeEnvironment

    def build(self, *args: Any, **changes: Any) -> Any:
        return self.Backend(None, *args)


_ONCE = "test_every_episode_ends_once_under_its_own_request"
_ABORT = "test_abort_gives_what_was_drawn_and_leaves_no_turn"
_MASK = "test_what_was_given_is_masked_and_the_rest_was_drawn"


class GivesARecordTwice(CleanEnvironment):
    caught_by = (_ONCE, _ABORT)

    class Backend(FakeEnvironment):
        def step(self) -> list[Finished]:
            ended = super().step()
            return [*ended, *ended[:1]]


class TrainsWhatItSays(CleanEnvironment):
    caught_by = (_MASK,)

    class Backend(FakeEnvironment):
        def record(self, episode: Episode, status: str) -> Finished:
            record = super().record(episode, status)
            ones = np.ones_like(record.columns["action_mask"])
            return replace(record, columns={**record.columns, "action_mask": ones})


class LeavesAColumnOut(CleanEnvironment):
    caught_by = (_MASK, "test_an_episode_follows_from_its_seed")

    class Backend(FakeEnvironment):
        def record(self, episode: Episode, status: str) -> Finished:
            record = super().record(episode, status)
            columns = {name: one for name, one in record.columns.items() if name != "turn"}
            return replace(record, columns=columns)


class AsksUnderOrdinalsOfRows(CleanEnvironment):
    caught_by = ("test_turns_are_asked_for_under_ordinals_of_their_own",)

    class Backend(FakeEnvironment):
        def __init__(self, config: None, context: WorkerContext, generator: Generator) -> None:
            super().__init__(config, context, generator)
            self._ordinals = iter(range(1_000_000))


class SeedsByTheOrderOfEpisodes(CleanEnvironment):
    caught_by = ("test_an_episode_follows_from_its_seed",)

    class Backend(FakeEnvironment):
        count = 0

        def submit(self, requests: Sequence[SampleRequest]) -> None:
            for request in requests:
                seed = request.seed
                if request.ordinal < FIRST_QUESTION:
                    self.count += 1
                    seed = self.count
                self._seeds[request.ordinal, request.sample] = seed
            super().submit(requests)

        @property
        def _seeds(self) -> dict[tuple[int, int], int]:
            return self.__dict__.setdefault("seeds", {})

        def _ask(self, episode: Episode) -> None:
            request = episode.request
            seed = self._seeds[request.ordinal, request.sample]
            shown = Episode(replace(request, seed=seed), episode.prompt, episode.turns)
            super()._ask(shown)
            for key, one in self._open.items():
                if one is shown:
                    self._open[key] = episode


class PlaysQuestions(CleanEnvironment):
    caught_by = ("test_questions_of_rewards_pass_through",)

    class Backend(FakeEnvironment):
        def submit(self, requests: Sequence[SampleRequest]) -> None:
            for request in requests:
                prompt = self._tokenizer.encode(request.prompt.text or "")
                self._ask(Episode(request, prompt))


class LetsTurnsOfAbortedEpisodesRun(CleanEnvironment):
    caught_by = (_ABORT,)

    class Backend(FakeEnvironment):
        def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
            generator, self._generator = self._generator, _Deaf()  # type: ignore[assignment]
            ended = super().abort(keys)
            self._generator = generator
            return ended

        def step(self) -> list[Finished]:
            ended = super().step()
            return [one for one in ended if one.request.ordinal < FIRST_QUESTION or one.columns]


class _Deaf:
    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        return []


class LeavesAProcess(CleanEnvironment):
    caught_by = ("test_close_leaves_no_process_and_an_open_generator",)

    class Backend(FakeEnvironment):
        left: ClassVar[list[subprocess.Popen[bytes]]] = []

        def __init__(self, config: None, context: WorkerContext, generator: Generator) -> None:
            super().__init__(config, context, generator)
            self.left.append(subprocess.Popen(["sleep", "60"]))

    @pytest.fixture(autouse=True)
    def _end(self) -> Iterator[None]:
        yield
        while self.Backend.left:
            process = self.Backend.left.pop()
            process.kill()
            process.wait()
