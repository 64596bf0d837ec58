"""The contract of a generator: its records, its seeds and its traits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.columns import ROUTING, TOKEN_COLUMNS, routing_problem
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import (
    Finished,
    Generator,
    SampleRequest,
    ScoresLogprobs,
)
from gcore_core.contract.records import ABORTED, FAILED, FINISHED, TRUNCATED, Prompt
from gcore_testing.contracts.base import claims, closing
from gcore_testing.contracts.draining import Drains, key_of, key_of_request
from gcore_testing.contracts.generator_engine import EngineTests
from gcore_testing.contracts.generator_logprobs import LogprobTests
from gcore_testing.contracts.generator_midway import MidwayTests, without_media
from gcore_testing.contracts.sleep import SleepTests

#: Names of tests that need sampled records. They are not claimed where the generator ``reads``.
_OF_SAMPLES = frozenset(
    {
        "test_the_same_action_has_the_same_logprob",
        "test_first_actions_occur_as_often_as_their_logprobs_say",
        "test_a_temperature_that_is_set_is_told_and_changes_the_logprobs",
        "test_the_end_token_is_trained_on",
        "test_logprobs_are_finite_and_not_positive",
        "test_greedy_samples_do_not_depend_on_the_seed",
        "test_samples_of_a_prompt_differ",
        "test_an_empty_prompt_is_answered_or_fails_alone",
        "test_a_prompt_beyond_any_context_fails_alone",
    }
)


class GeneratorContract(EngineTests, LogprobTests, MidwayTests, SleepTests, Drains):
    """To test a generator, override ``provider``, or both ``generator`` and ``traits``.

    tolerance: how much log-probs may differ, in nats.
    reads: whether its records are read and not sampled. What is about chance, log-probs and prompts
        without answers is then not claimed.
    samples: number of samples for each prompt.

    One that claims routing needs the fixture ``expert_generator``, unless ``generator`` has
    experts. A generator that claims receives_weights and has no model directory also needs the
    fixture ``weights``. One that claims sleeps and is not on CUDA needs the fixture ``memory``.
    """

    kind: ClassVar[str] = "generator"
    tolerance: ClassVar[float] = 1e-4
    reads: ClassVar[bool] = False
    samples: ClassVar[int] = 6

    @pytest.fixture(autouse=True)
    def _leave_out_samples(self, request: pytest.FixtureRequest) -> None:
        if self.reads and request.function.__name__ in _OF_SAMPLES:
            self.not_claimed("samples (its records are read)")

    @pytest.fixture
    def generator(self, context: WorkerContext) -> Iterator[Any]:
        yield from closing(self.build(context))

    @pytest.fixture
    def expert_generator(self, generator: Any) -> Any:
        """Gives a generator of a mixture of experts, for the claim "routing"."""
        return generator

    @pytest.fixture
    def prompts(self) -> list[Prompt]:
        """Gives prompts of different lengths that the model can read; one has one character."""
        return [
            Prompt(row=row, text=text) for row, text in enumerate(["1+2=", "7", "12+34=", "5+6+7="])
        ]

    @pytest.fixture
    def requests(self, prompts: list[Prompt]) -> list[SampleRequest]:
        return requests_of(prompts, self.samples)

    @pytest.fixture
    def end_tokens(self) -> frozenset[int]:
        """Gives the actions that end a sample; those that end short samples may be left out."""
        return frozenset()

    # -- records -----------------------------------------------------------------------------------

    def test_it_is_a_generator(self, generator: Any) -> None:
        assert isinstance(generator, Generator), (
            "it lacks a method of gcore_core.contract.generator.Generator"
        )

    def test_every_request_ends_exactly_once(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        generator.submit(requests)
        ended = [key_of(record) for record in self.drain(generator, requests)]
        assert sorted(ended) == sorted(key_of_request(r) for r in requests)
        assert generator.step() == [], "a generator without work must return nothing"

    def test_a_record_answers_its_own_request(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        """Each record carries its request unchanged, and the tokens of that request's prompt.

        They are the tokens that the request has when it is submitted alone.
        """
        together = self.run(generator, requests)
        for request in requests[:: self.samples]:
            alone = self.run(generator, [request])[key_of_request(request)]
            for other in requests:
                if other.ordinal == request.ordinal:
                    record = together[key_of_request(other)]
                    assert record.request == other
                    np.testing.assert_array_equal(
                        record.columns["prompt_ids"], alone.columns["prompt_ids"]
                    )

    def test_columns_have_their_names_and_dtypes(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        for record in self.run(generator, requests).values():
            for name, dtype in TOKEN_COLUMNS.items():
                assert name in record.columns, f"column {name} is missing"
                assert record.columns[name].dtype == dtype, f"column {name} must be {dtype}"
            assert record.columns["temperature"].shape == ()
            try:
                record.columns["text"].tobytes().decode("utf-8")
            except UnicodeDecodeError as error:
                pytest.fail(f"column text must be UTF-8; a cut character is replaced: {error}")

    def test_every_action_has_its_logprob(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        for record in self.run(generator, requests).values():
            actions = record.columns["action_ids"].size
            assert actions > 0
            assert record.columns["logp"].size == actions
            assert record.columns["action_mask"].size == actions

    def test_logprobs_are_finite_and_not_positive(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        for record in self.run(generator, requests).values():
            logp = record.columns["logp"]
            assert np.isfinite(logp).all(), f"{record.request.ordinal}: {logp}"
            assert (logp <= 0).all(), f"{record.request.ordinal}: {logp}"

    def test_a_record_says_how_it_ended(
        self, generator: Any, requests: list[SampleRequest], end_tokens: frozenset[int]
    ) -> None:
        """A record is truncated exactly when it reached the limit without an action that ends it.

        The limit is the length of the longest record.
        """
        records = list(self.run(generator, requests).values())
        limit = max(record.columns["action_ids"].size for record in records)
        ends = set(end_tokens)
        for record in records:
            assert record.status in (FINISHED, TRUNCATED), f"status {record.status!r}"
            if record.status == FINISHED and record.columns["action_ids"].size < limit:
                ends.add(int(record.columns["action_ids"][-1]))
        cut = [r for r in records if r.columns["action_ids"].size == limit and not r.reason]
        wrong = [
            r
            for r in cut
            if ends and (int(r.columns["action_ids"][-1]) in ends) != (r.status == FINISHED)
        ]
        assert not wrong, (
            f"{len(wrong)} of {len(cut)} records of {limit} actions say {wrong[0].status!r}"
        )

    def test_greedy_samples_do_not_depend_on_the_seed(
        self, generator: Any, prompts: list[Prompt]
    ) -> None:
        records = self.run(generator, requests_of(prompts, 3, greedy=True))
        for ordinal in range(len(prompts)):
            first, *repeats = [records[ordinal, sample].columns for sample in range(3)]
            assert first["temperature"] == 1, "a greedy record's log-probs are at temperature 1"
            for other in repeats:
                np.testing.assert_array_equal(first["action_ids"], other["action_ids"])

    def test_samples_of_a_prompt_differ(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        records = self.run(generator, requests)
        groups = [
            {actions(records[key]) for key in records if key[0] == r.ordinal} for r in requests
        ]
        assert any(len(group) > 1 for group in groups), "all samples of every prompt are the same"

    def test_two_batches_in_flight_do_not_mix(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        """A batch submitted while another runs gets its own records.

        Where the same seed gives the same tokens, they are those that the batch has alone.
        """
        half = len(requests) // 2 // self.samples * self.samples
        first = requests[:half]
        second = requests[half:]
        alone = {**self.run(generator, first), **self.run(generator, second)}
        generator.submit(first)
        ended = list(generator.step())
        generator.submit(second)
        ended += self.drain(generator, requests, ended)
        assert sorted(map(key_of, ended)) == sorted(alone)
        for record in ended:
            expected = alone[key_of(record)].columns
            np.testing.assert_array_equal(record.columns["prompt_ids"], expected["prompt_ids"])
            if self.claimed().determinism:
                np.testing.assert_array_equal(record.columns["action_ids"], expected["action_ids"])

    # -- bad requests ------------------------------------------------------------------------------

    def test_an_empty_prompt_is_answered_or_fails_alone(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        self._fails_alone(generator, requests, Prompt(row=0, text=""))

    def test_a_prompt_beyond_any_context_fails_alone(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        self._fails_alone(generator, requests, Prompt(row=0, text="1+" * 100_000))

    def _fails_alone(self, generator: Any, requests: list[SampleRequest], prompt: Prompt) -> None:
        bad = SampleRequest(ordinal=1000, sample=0, seed=1, prompt=prompt)
        requests = [requests[0], bad, *requests[1:]]
        generator.submit(requests)
        records = {key_of(record): record for record in self.drain(generator, requests)}
        for key, record in records.items():
            if key != (1000, 0):
                assert record.status in (FINISHED, TRUNCATED), (
                    f"{key} failed with it: {record.reason}"
                )
            elif record.status == FAILED:
                assert record.reason, "a failed record must say why"
                assert not record.columns, "a failed record has no columns"

    # -- claims ------------------------------------------------------------------------------------

    @claims("determinism")
    def test_the_same_seed_gives_the_same_tokens(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        once = self.run(generator, requests)
        again = self.run(generator, requests)
        for key in once:
            for name in ("action_ids", "logp"):
                assert once[key].columns[name].tobytes() == again[key].columns[name].tobytes(), (
                    key,
                    name,
                )

    @claims("determinism")
    def test_the_seed_decides_and_not_the_place(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        """When two samples of a prompt exchange their seeds, they exchange their tokens.

        The order in which they are submitted is another one, too.
        """
        turned = [request_with(r, sample=(r.sample + 1) % self.samples) for r in requests]
        before = self.run(generator, requests)
        after = self.run(generator, turned[::-1])
        for request, other in zip(requests, turned, strict=True):
            one = before[key_of_request(request)]
            two = after[key_of_request(other)]
            np.testing.assert_array_equal(one.columns["action_ids"], two.columns["action_ids"])

    @claims("scores_logprobs")
    def test_logprobs_are_those_at_the_temperature_told(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        """A record's log-probs are those of its actions, scored again at its temperature.

        Records with images are not scored again, and one without must be among them.
        """
        assert isinstance(generator, ScoresLogprobs)
        records = without_media(self.run(generator, requests).values())
        scored = generator.logprobs([record.columns for record in records])
        assert len(scored) == len(records) > 0
        for record, logp in zip(records, scored, strict=True):
            shared = min(logp.size, record.columns["logp"].size)  # another test checks the lengths
            np.testing.assert_allclose(
                logp[:shared], record.columns["logp"][:shared], atol=self.tolerance, rtol=0
            )

    @claims("routing")
    def test_records_say_which_experts_computed_their_tokens(
        self, expert_generator: Any, requests: list[SampleRequest]
    ) -> None:
        """Each record says it of all tokens that were read, and of the same layers."""
        layers = set()
        for record in self.run(expert_generator, requests).values():
            columns = record.columns
            assert ROUTING in columns, f"column {ROUTING} is missing"
            routing = columns[ROUTING]
            problem = routing_problem(routing, len(columns["prompt_ids"]), len(columns["logp"]))
            assert not problem, problem
            layers.add(routing.shape[1:])
        assert len(layers) == 1, f"layers and experts of a token differ between records: {layers}"

    @claims("abort")
    def test_abort_returns_what_there_is(
        self, generator: Any, requests: list[SampleRequest]
    ) -> None:
        with self.held(generator):
            generator.submit(requests)
            ended = [record for _ in range(3) for record in generator.step()]
            running = sorted({key_of_request(r) for r in requests} - {key_of(r) for r in ended})
            assert running, "everything ended within three steps: let samples be longer"
            survivor = running[0]
            to_abort = running[1:]
            aborted = generator.abort([*to_abort, (99_999, 0)])
        assert sorted(map(key_of, aborted)) == to_abort, (
            "abort returns the named samples, and ignores unknown ones"
        )
        assert {record.status for record in aborted} <= {ABORTED, FINISHED, TRUNCATED}
        assert any(record.columns["action_ids"].size for record in aborted), (
            "their actions so far are lost"
        )
        later = self.drain(generator, [r for r in requests if key_of_request(r) == survivor])
        later += [record for _ in range(100) for record in generator.step()]
        assert [key_of(record) for record in later] == [survivor], "an aborted sample came back"

    @claims("abort")
    def test_an_aborted_answer_is_the_beginning_of_the_whole(
        self, generator: Any, prompts: list[Prompt]
    ) -> None:
        """A greedy answer that is aborted is the beginning of the whole one, in all its columns."""
        wholes = self.run(generator, requests_of(prompts, 1, greedy=True))
        asked = [replace(whole.request, sample=1) for whole in wholes.values()]
        with self.held(generator):
            generator.submit(asked)
            for _ in range(3):
                generator.step()
            parts = generator.abort([key_of_request(request) for request in asked])
        begun = 0
        for part in parts:
            whole = wholes[part.request.ordinal, 0]
            if part.status != ABORTED or not part.columns["action_ids"].size:
                continue
            self._is_beginning_of(part, whole)
            begun += 1
        assert begun, "every answer ended within three steps: let answers be longer"

    def _is_beginning_of(self, part: Finished, whole: Finished) -> None:
        columns = part.columns
        count = columns["action_ids"].size
        np.testing.assert_array_equal(columns["prompt_ids"], whole.columns["prompt_ids"])
        np.testing.assert_array_equal(columns["action_ids"], whole.columns["action_ids"][:count])
        assert columns["temperature"] == whole.columns["temperature"]
        assert columns["action_mask"].size == count, "the mask of an aborted answer is cut off"
        assert columns["action_mask"].all(), "an action of an aborted answer is not trained on"
        expected = whole.columns["logp"][:count]
        np.testing.assert_allclose(columns["logp"], expected, atol=self.tolerance, rtol=0)
        if ROUTING in whole.columns:
            assert ROUTING in columns, f"an aborted answer has no column {ROUTING}"
            problem = routing_problem(columns[ROUTING], columns["prompt_ids"].size, count)
            assert not problem, problem


def requests_of(
    prompts: Sequence[Prompt], samples: int, *, greedy: bool = False
) -> list[SampleRequest]:
    """Makes ``samples`` requests for every prompt, each with a seed of its own."""
    return [
        SampleRequest(
            ordinal=ordinal,
            sample=sample,
            seed=7919 * ordinal + sample,
            prompt=prompt,
            greedy=greedy,
        )
        for ordinal, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def request_with(request: SampleRequest, *, sample: int) -> SampleRequest:
    """Returns a request with the same seed and prompt and another sample number."""
    return SampleRequest(
        ordinal=request.ordinal, sample=sample, seed=request.seed, prompt=request.prompt
    )


def actions(record: Finished) -> bytes:
    """Returns the actions as bytes, which can be compared and put into a set."""
    return record.columns["action_ids"].tobytes()
