"""The contract of an environment: of each episode one record, whatever else is asked meanwhile."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WorkerDied
from gcore_core.contract.generator import Draws, Finished, SampleRequest
from gcore_core.contract.order import FIRST_QUESTION, FIRST_TURN
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import FAILED, FINISHED, Prompt
from gcore_testing import fake
from gcore_testing.contracts.base import NotClaimed, closing
from gcore_testing.contracts.draining import Drains, key_of, key_of_request
from gcore_testing.contracts.generator import requests_of


class Watched:
    """Is a generator that notes what it is asked and what it gives.

    open: keys of what was asked and has not ended.
    asked: all requests.
    drawn: (token, log-prob) of every action that it has given.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.open: set[tuple[int, int]] = set()
        self.asked: list[SampleRequest] = []
        self.drawn: set[tuple[int, float]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.asked += requests
        self.open |= {key_of_request(request) for request in requests}
        self._generator.submit(requests)

    def step(self) -> list[Finished]:
        return self._noted(self._generator.step())

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        return self._noted(self._generator.abort(keys))

    def _noted(self, ended: list[Finished]) -> list[Finished]:
        for record in ended:
            self.open.discard(key_of(record))
            columns = record.columns
            if columns:
                pairs = zip(columns["action_ids"].tolist(), columns["logp"].tolist(), strict=True)
                self.drawn |= set(pairs)
        return ended


class Answering:
    """Is a role that speaks for a player: it implements Speaker of the contract's questions.

    asked: all questions.
    answers: what each question gets.
    """

    role = "speaker"

    def __init__(self, says: Callable[[Question], Answer]) -> None:
        self._says = says
        self._thread = ThreadPoolExecutor(1)  # as in a run, answers come from another thread
        self.asked: list[Question] = []
        self.answers: list[Future[Answer]] = []

    def ask(self, question: Question) -> Future[Answer]:
        self.asked.append(question)
        self.answers.append(self._thread.submit(self._says, question))
        return self.answers[-1]

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def _digit(question: Question) -> Answer:
    return Answer(text=str(question.seed % 10), status=FINISHED, n_prompt=1, n_actions=1)


class EnvironmentContract(Drains):
    """To test an environment, override ``provider``, and ``prompts`` where it plays other rows.

    It is built around the fixture ``generator``, by default one of letters without a model. An
    environment that needs a real tokenizer gives another, with the trait ``tokens``.

    samples: number of episodes for each prompt.
    player: one of several players in each episode, for whom a role may speak; None: there is none.
    """

    kind: ClassVar[str] = "environment"
    samples: ClassVar[int] = 3
    player: ClassVar[str | None] = None
    #: An environment waits for others within a step; a step without a record is no sign.
    steps_limit: ClassVar[int] = 100_000

    @pytest.fixture
    def prompts(self) -> list[Prompt]:
        return [Prompt(row=row, text=text) for row, text in enumerate(["1+2=", "7", "12+34="])]

    @pytest.fixture
    def generator(self, context: WorkerContext) -> Iterator[Any]:
        """Gives what draws the turns."""
        yield from closing(fake.FakeGenerator(fake.FakeGeneratorConfig(), context))

    @pytest.fixture
    def watched(self, generator: Any) -> Watched:
        return Watched(generator)

    @pytest.fixture
    def draws(self, context: WorkerContext, watched: Watched) -> Iterator[Any]:
        yield from closing(self.build(replace(context, acts=True), watched))

    @pytest.fixture
    def requests(self, prompts: list[Prompt]) -> list[SampleRequest]:
        """Gives requests of training and, with ordinals below 0, of an evaluation."""
        training = requests_of(prompts, self.samples)
        greedy = requests_of(prompts, 1, greedy=True)
        return training + [replace(one, ordinal=-1 - 2 * one.ordinal) for one in greedy]

    def test_it_is_asked_as_a_generator_is(self, draws: Any) -> None:
        assert isinstance(draws, Draws), "it lacks a method of Draws"

    def test_every_episode_ends_once_under_its_own_request(
        self, draws: Any, requests: list[SampleRequest]
    ) -> None:
        draws.submit(requests[:2])
        ended = list(draws.step())
        draws.submit(requests[2:])
        ended += self.drain(draws, requests, ended)
        ended += draws.step()
        assert sorted(map(key_of, ended)) == sorted(map(key_of_request, requests))
        asked = {key_of_request(request): request for request in requests}
        for record in ended:
            assert record.request is asked[key_of(record)], "a record has another request"

    def test_what_was_given_is_masked_and_the_rest_was_drawn(
        self, draws: Any, watched: Watched, requests: list[SampleRequest]
    ) -> None:
        """An action with mask 1 is one that the generator drew, with its log-prob."""
        for record in self.run(draws, requests).values():
            columns = record.columns
            count = columns["action_ids"].size
            assert columns["action_mask"].any(), "an episode has no action"
            drawn = columns["action_mask"] == 1
            assert (columns["logp"][~drawn] == 0).all(), "a given token has a log-prob"
            pairs = zip(
                columns["action_ids"][drawn].tolist(), columns["logp"][drawn].tolist(), strict=True
            )
            assert set(pairs) <= watched.drawn, "an action was not drawn by the generator"
            for name in self._columns():
                assert columns[name].dtype == np.float32, f"column {name} must be float32"
                assert columns[name].shape == (count,), f"column {name} has no value an action"

    def test_turns_are_asked_for_under_ordinals_of_their_own(
        self, draws: Any, watched: Watched, requests: list[SampleRequest]
    ) -> None:
        self.run(draws, requests)
        assert watched.asked
        for turn in watched.asked:
            assert turn.ordinal >= FIRST_TURN, "its ordinal may be that of a row or a question"
            assert turn.ids is not None, "a turn is asked for by its tokens"
        keys = [key_of_request(turn) for turn in watched.asked]
        assert len(keys) == len(set(keys)), "two turns have one key"

    def test_an_episode_follows_from_its_seed(
        self, draws: Any, requests: list[SampleRequest]
    ) -> None:
        """The same requests give the same episodes, in whatever order they come."""
        once = self.run(draws, requests)
        again = self.run(draws, requests[::-1])
        for key, record in once.items():
            for name in ("prompt_ids", "action_ids", "action_mask", *self._columns()):
                assert record.columns[name].tobytes() == again[key].columns[name].tobytes(), name

    def test_questions_of_rewards_pass_through(
        self, draws: Any, generator: Any, requests: list[SampleRequest], prompts: list[Prompt]
    ) -> None:
        """They are answered by the generator alone, while episodes go on."""
        asked = [
            replace(one, ordinal=one.ordinal + FIRST_QUESTION) for one in requests_of(prompts, 1)
        ]
        expected = self.run(generator, asked)
        draws.submit([*requests, *asked])
        records = {key_of(one): one for one in self.drain(draws, [*requests, *asked])}
        for key, record in expected.items():
            assert records[key].request is record.request
            for name in ("prompt_ids", "action_ids", "text"):
                np.testing.assert_array_equal(records[key].columns[name], record.columns[name])

    def test_abort_gives_what_was_drawn_and_leaves_no_turn(
        self, draws: Any, watched: Watched, requests: list[SampleRequest]
    ) -> None:
        draws.submit(requests)
        ended = list(draws.step())
        running = sorted(
            {key_of_request(request) for request in requests} - {key_of(one) for one in ended}
        )
        assert running, "everything ended within a step"
        survivor, *to_abort = running
        aborted = draws.abort([*to_abort, (99_999, 0)])
        assert sorted(map(key_of, aborted)) == to_abort, "abort returns the named episodes"
        asked = [one for one in requests if key_of_request(one) == survivor]
        later = self.drain(draws, asked)
        later += [record for _ in range(100) for record in draws.step()]
        assert [key_of(one) for one in later] == [survivor], "an aborted episode came back"
        assert not watched.open, "its generator still draws turns of aborted episodes"

    @contextmanager
    def played_with(
        self, context: WorkerContext, watched: Watched, says: Callable[[Question], Answer]
    ) -> Iterator[tuple[Any, Answering]]:
        """Gives an environment, and the role that speaks for its ``player``."""
        if self.player is None:
            raise NotClaimed("a player for whom a role may speak (player)")
        role = Answering(says)
        speaks = replace(context, acts=True, speakers={self.player: role})
        draws = self.build(speaks, watched)
        try:
            yield draws, role
        finally:
            draws.close()
            role.close()

    def test_what_a_role_says_is_no_action_of_the_policy(
        self, context: WorkerContext, watched: Watched, requests: list[SampleRequest]
    ) -> None:
        """It is asked once a turn, with a seed that follows from the sample's."""
        seeds = []
        for _ in range(2):
            with self.played_with(context, watched, _digit) as (draws, role):
                for record in self.run(draws, requests).values():
                    columns = record.columns
                    drawn = columns["action_mask"] == 1
                    assert drawn.any(), "an episode has no action"
                    pairs = zip(
                        columns["action_ids"][drawn].tolist(),
                        columns["logp"][drawn].tolist(),
                        strict=True,
                    )
                    assert set(pairs) <= watched.drawn, "an action was not drawn by the generator"
                assert len(role.asked) >= len(requests), "the role was not asked"
                seeds.append(sorted(question.seed for question in role.asked))
        assert seeds[0] == seeds[1], "a question has another seed when it is asked again"

    def test_a_role_that_gives_no_answer_costs_its_own_episode_alone(
        self, context: WorkerContext, watched: Watched, requests: list[SampleRequest]
    ) -> None:
        lost = itertools.count()

        def says(question: Question) -> Answer:
            if next(lost) == 0:
                raise WorkerDied("speaker.0 ended")
            return _digit(question)

        with self.played_with(context, watched, says) as (draws, _):
            records = self.run(draws, requests).values()
        failed = [record for record in records if record.status == FAILED]
        assert len(failed) == 1 and failed[0].reason, "the failure is nobody's, or not told"
        assert not watched.open, "its generator still draws turns"

    def test_abort_gives_up_what_a_role_owes(
        self, context: WorkerContext, watched: Watched, requests: list[SampleRequest]
    ) -> None:
        may_answer = threading.Event()

        def says(question: Question) -> Answer:
            may_answer.wait()
            return _digit(question)

        with self.played_with(context, watched, says) as (draws, role):
            try:
                draws.submit(requests)
                for _ in range(self.steps_limit):
                    assert not draws.step(), "an episode ended without what its role owes"
                    if len(role.answers) >= len(requests):
                        break
                aborted = draws.abort([key_of_request(request) for request in requests])
                assert sorted(map(key_of, aborted)) == sorted(map(key_of_request, requests))
                # The first answer is being made; nobody can take it back.
                assert all(answer.cancelled() for answer in role.answers[1:])
            finally:
                may_answer.set()
            assert not draws.step(), "an aborted episode came back"

    def test_close_leaves_no_process_and_an_open_generator(
        self, context: WorkerContext, watched: Watched, requests: list[SampleRequest]
    ) -> None:
        """Also with episodes that run."""
        before = _children()
        draws = self.build(replace(context, acts=True), watched)
        draws.submit(requests)
        draws.step()
        draws.close()
        assert _children() <= before, "a process is left"
        question = replace(requests[0], ordinal=FIRST_QUESTION, sample=99)
        self.run(watched, [question])

    def _columns(self) -> Sequence[str]:
        return getattr(self.description(), "columns", ())


def _children() -> set[int]:
    """Returns the processes that this one has started and that have not ended, by their ids."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(file.parent.name))
    return found
