"""Environments with one fault each."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
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
from gcore_core.contract.questions import Answer, Question, Speaker
from gcore_core.contract.records import FAILED

_PROVIDER = EnvironmentProvider(
    summary="nods between two turns",
    factory="gcore_testing.fake_environment:FakeEnvironment",
    columns=("turn",),
)


class CleanEnvironment(EnvironmentContract):
    provider = _PROVIDER
    caught_by: ClassVar[tuple[str, ...]] = ()
    player = "1"
    Backend: ClassVar[type[FakeEnvironment]] = FakeEnvironment

    def build(self, *args: Any, **changes: Any) -> Any:
        return self.Backend(None, *args)


_ONCE = "test_every_episode_ends_once_under_its_own_request"
_ABORT = "test_abort_gives_what_was_drawn_and_leaves_no_turn"
_ROLE = "test_what_a_role_says_is_no_action_of_the_policy"
_MASK = "test_what_was_given_is_masked_and_the_rest_was_drawn"


class GivesARecordTwice(CleanEnvironment):
    caught_by = (_ONCE, _ABORT)

    class Backend(FakeEnvironment):
        def step(self) -> list[Finished]:
            ended = super().step()
            return [*ended, *ended[:1]]


class TrainsWhatItSays(CleanEnvironment):
    caught_by = (_MASK, _ROLE)

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


class LeavesQuestionsOfAbortedEpisodes(CleanEnvironment):
    caught_by = ("test_abort_gives_up_what_a_role_owes",)

    class Backend(FakeEnvironment):
        def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
            owed, self._owed = self._owed, [(episode, Future()) for episode, _ in self._owed]
            ended = super().abort(keys)
            self._owed = [one for one in owed if one[0] in [left for left, _ in self._owed]]
            return ended


class FailsAllWithOneRole(CleanEnvironment):
    caught_by = ("test_a_role_that_gives_no_answer_costs_its_own_episode_alone",)

    class Backend(FakeEnvironment):
        is_lost = False

        def _roles_spoke(self) -> list[Finished]:
            ended = super()._roles_spoke()
            self.is_lost = self.is_lost or any(one.status == FAILED for one in ended)
            return ended

        def step(self) -> list[Finished]:
            ended = super().step()
            if not self.is_lost:
                return ended
            return [replace(one, status=FAILED, reason="lost") for one in ended]


class SeedsOfQuestionsByTheirOrder(CleanEnvironment):
    caught_by = (_ROLE,)

    class Backend(FakeEnvironment):
        asked = itertools.count()

        def __init__(self, config: None, context: WorkerContext, generator: Generator) -> None:
            super().__init__(config, context, generator)
            self._speakers = [_Counting(one, self.asked) for one in self._speakers]


class _Counting:
    """Asks a role with seeds that say how many questions came before."""

    def __init__(self, speaker: Speaker, asked: Iterator[int]) -> None:
        self.role = speaker.role
        self._speaker = speaker
        self._asked = asked

    def ask(self, question: Question) -> Future[Answer]:
        return self._speaker.ask(replace(question, seed=next(self._asked)))


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
