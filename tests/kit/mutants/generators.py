"""Generators with one fault each. ``caught_by``: the test named for the fault first, then others
that notice it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import xxhash
from gcore_testing import GeneratorContract, fake
from gcore_testing.fake import FakeGenerator, log_softmax

from gcore_core.contract.columns import VERSION, Columns, action_versions
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, FINISHED, TensorSpec, WeightPlan
from gcore_core.contract.traits import Traits
from tests.support.fake_generators import OfBackend

#: It compares each log-prob with that of the version that the record names, so many faults fail it.
_CUT = "test_a_record_that_was_cut_says_which_version_sampled_each_action"
_NEW = "test_new_samples_use_nothing_that_older_weights_have_cached"


_FAKE = next(iter(fake.gcore_generators()))


class Clean(OfBackend, GeneratorContract):
    provider = _FAKE

    @pytest.fixture
    def memory(self, generator: FakeGenerator) -> Callable[[], int]:
        return lambda: generator.memory_bytes


def with_columns(record: Finished, **columns: Any) -> Finished:
    return replace(record, columns={**record.columns, **columns})


# -- records ---------------------------------------------------------------------------------------


class ReordersSamples(Clean):
    caught_by = (
        "test_a_record_answers_its_own_request",
        "test_two_batches_in_flight_do_not_mix",
        "test_an_aborted_answer_is_the_beginning_of_the_whole",
    )

    class Backend(FakeGenerator):
        """Of samples that end together, each gets the prompt of the next."""

        def step(self) -> list[Finished]:
            records = super().step()
            ended = [record for record in records if record.columns]
            others = [*ended[1:], *ended[:1]]
            return [record for record in records if not record.columns] + [
                with_columns(one, prompt_ids=two.columns["prompt_ids"])
                for one, two in zip(ended, others, strict=True)
            ]


class ReturnsASampleTwice(Clean):
    caught_by = (
        "test_every_request_ends_exactly_once",
        "test_two_batches_in_flight_do_not_mix",
        "test_abort_returns_what_there_is",
    )

    class Backend(FakeGenerator):
        def step(self) -> list[Finished]:
            ended = super().step()
            return [*ended, *ended[:1]]


class DropsALogprob(Clean):
    caught_by = (
        "test_an_aborted_answer_is_the_beginning_of_the_whole",
        "test_every_action_has_its_logprob",
        "test_first_actions_occur_as_often_as_their_logprobs_say",
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        "test_a_push_before_the_first_action_leaves_nothing_of_the_old_weights",
        "test_two_pushes_cut_a_sample_twice",
        _CUT,
        _NEW,
    )

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            return with_columns(record, logp=record.columns["logp"][:-1])


class CountsTokensIn64Bits(Clean):
    caught_by = ("test_columns_have_their_names_and_dtypes",)

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            return with_columns(record, action_ids=record.columns["action_ids"].astype(np.int64))


class ForgetsTheSoftmax(Clean):
    caught_by = (
        "test_logprobs_are_finite_and_not_positive",
        "test_first_actions_occur_as_often_as_their_logprobs_say",
        "test_logprobs_are_those_at_the_temperature_told",
        "test_samples_that_run_through_a_push_say_so",
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        "test_a_push_before_the_first_action_leaves_nothing_of_the_old_weights",
        "test_two_pushes_cut_a_sample_twice",
        _CUT,
        _NEW,
    )

    class Backend(FakeGenerator):
        """Logits instead of log-probs."""

        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            return with_columns(record, logp=self._logits[record.columns["action_ids"]])


class LogprobsOfAnotherTemperature(Clean):
    caught_by = (
        "test_logprobs_are_those_at_the_temperature_told",
        "test_samples_that_run_through_a_push_say_so",
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        "test_a_push_before_the_first_action_leaves_nothing_of_the_old_weights",
        "test_two_pushes_cut_a_sample_twice",
        _CUT,
        _NEW,
    )

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            return with_columns(
                record,
                logp=log_softmax(self._logits / np.float32(0.5))[record.columns["action_ids"]],
            )


class TruncatedReportedAsFinished(Clean):
    caught_by = ("test_a_record_says_how_it_ended",)

    class Backend(FakeGenerator):
        def step(self) -> list[Finished]:
            return [
                record if record.status == FAILED else replace(record, status=FINISHED)
                for record in super().step()
            ]


class AnEmptyPromptFailsTheBatch(Clean):
    caught_by = ("test_an_empty_prompt_is_answered_or_fails_alone",)

    class Backend(FakeGenerator):
        _bad: Sequence[SampleRequest] = ()

        def submit(self, requests: Sequence[SampleRequest]) -> None:
            if all(request.prompt.text for request in requests):
                super().submit(requests)
            else:
                self._bad = requests

        def step(self) -> list[Finished]:
            bad, self._bad = self._bad, ()
            return super().step() + [
                Finished(request=r, status=FAILED, versions=(0, 0), reason="prompt_empty")
                for r in bad
            ]


class ALongPromptRaises(Clean):
    caught_by = ("test_a_prompt_beyond_any_context_fails_alone",)

    class Backend(FakeGenerator):
        def submit(self, requests: Sequence[SampleRequest]) -> None:
            if any(len(request.prompt.text or "") > 1000 for request in requests):
                raise ValueError("a prompt is too long")
            super().submit(requests)


class LeaksABatchIntoAnother(Clean):
    caught_by = (
        "test_two_batches_in_flight_do_not_mix",
        _NEW,
    )

    class Backend(FakeGenerator):
        """What joins a running batch begins with what that has so far."""

        def submit(self, requests: Sequence[SampleRequest]) -> None:
            running = next(iter(self._running.values()), None)
            super().submit(requests)
            if running is not None:
                for request in requests:
                    self._running[request.ordinal, request.sample][1][:] = running[1]


class MasksTheEndToken(Clean):
    caught_by = (
        "test_the_end_token_is_trained_on",
        "test_first_actions_occur_as_often_as_their_logprobs_say",
    )

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            mask = record.columns["action_mask"].copy()
            mask[-1:] = status != FINISHED
            return with_columns(record, action_mask=mask)


class CutsACharacter(Clean):
    caught_by = ("test_columns_have_their_names_and_dtypes",)

    class Backend(FakeGenerator):
        """The text of an answer that was cut ends with the first byte of a character."""

        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            text = np.append(record.columns["text"], np.uint8(0xE2))
            return with_columns(record, text=text)


class CleanCool(Clean):
    config: ClassVar[dict[str, float]] = {"temperature": 0.5}

    @pytest.fixture
    def generator(self, context: WorkerContext) -> FakeGenerator:
        return self.Backend(fake.FakeGeneratorConfig(temperature=0.5), context)


class IgnoresTheTemperature(CleanCool):
    caught_by = ("test_a_temperature_that_is_set_is_told_and_changes_the_logprobs",)

    class Backend(FakeGenerator):
        def _temperature(self, greedy: bool) -> np.float32:
            return np.float32(1)


class TellsATemperatureThatItIgnores(CleanCool):
    caught_by = (
        "test_a_temperature_that_is_set_is_told_and_changes_the_logprobs",
        "test_logprobs_are_those_at_the_temperature_told",
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        "test_a_push_before_the_first_action_leaves_nothing_of_the_old_weights",
        "test_two_pushes_cut_a_sample_twice",
        _CUT,
        _NEW,
    )

    class Backend(FakeGenerator):
        def _table(self, greedy: bool) -> np.ndarray:
            return log_softmax(self._logits)


class LoadsInPlace(Clean):
    caught_by = ("test_weights_that_came_by_half_are_never_sampled_from",)

    class Backend(FakeGenerator):
        """It goes on with what has come so far."""

        def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
            super().load_weights(tensors)
            parts = {
                spec.name: part.view(np.float32) for spec, part in fake.tensors_of(self._logits)
            }
            self._logits = np.concatenate(list((parts | self._incoming).values()))


# -- engines that claim no more than a push --------------------------------------------------------


class PushOnly(FakeGenerator):
    """Can do what the scaffold writes, and nothing else."""

    fingerprint = None  # type: ignore[assignment]
    logprobs = None  # type: ignore[assignment]
    sleep = None  # type: ignore[assignment]
    wake = None  # type: ignore[assignment]

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        raise NotImplementedError("a sample cannot be ended")


class CleanPushOnly(Clean):
    traits = Traits(receives_weights=True)
    Backend: ClassVar[type[FakeGenerator]] = PushOnly


class LogprobsAreShiftedByOne(CleanPushOnly):
    caught_by = (
        "test_the_same_action_has_the_same_logprob",
        "test_first_actions_occur_as_often_as_their_logprobs_say",
        "test_samples_that_run_through_a_push_say_so",
    )

    class Backend(PushOnly):
        """Each action has the log-prob of the action before it."""

        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            return with_columns(record, logp=np.roll(record.columns["logp"], 1))


class LogprobsOfAnotherSample(CleanPushOnly):
    caught_by = (
        "test_the_same_action_has_the_same_logprob",
        "test_first_actions_occur_as_often_as_their_logprobs_say",
        "test_samples_that_run_through_a_push_say_so",
    )

    class Backend(PushOnly):
        """Of samples that end together, each gets the log-probs of the next."""

        def step(self) -> list[Finished]:
            ended = super().step()
            others = [*ended[1:], *ended[:1]]
            return [
                with_columns(one, logp=two.columns["logp"])
                for one, two in zip(ended, others, strict=True)
            ]


class LogprobsAreNotOfTheSamplingTemperature(CleanPushOnly):
    caught_by = ("test_first_actions_occur_as_often_as_their_logprobs_say",)

    class Backend(PushOnly):
        """Draws at temperature 0.3, and tells the log-probs of temperature 1."""

        def _draw(self, request: SampleRequest, position: int) -> int:
            logits = self._logits
            self._logits = logits / np.float32(0.3)
            letter = super()._draw(request, position)
            self._logits = logits
            return letter


class NeverDrawsTheLastLetters(CleanPushOnly):
    caught_by = ("test_first_actions_occur_as_often_as_their_logprobs_say",)

    class Backend(PushOnly):
        """Draws from the six most probable letters, and tells log-probs over all nine."""

        def _draw(self, request: SampleRequest, position: int) -> int:
            logits = self._logits
            self._logits = np.where(logits >= np.sort(logits)[3], logits, -50).astype(np.float32)
            letter = super()._draw(request, position)
            self._logits = logits
            return letter


class TellsTheLogprobsOfNewWeights(CleanPushOnly):
    caught_by = ("test_samples_that_run_through_a_push_say_so",)

    class Backend(PushOnly):
        """Log-probs are computed when a sample ends, under the weights of then."""

        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            return with_columns(
                record, logp=log_softmax(self._logits)[record.columns["action_ids"]]
            )


# -- seeds -----------------------------------------------------------------------------------------


class SameSeedOtherTokens(Clean):
    caught_by = (
        "test_the_same_seed_gives_the_same_tokens",
        "test_the_seed_decides_and_not_the_place",
        "test_two_batches_in_flight_do_not_mix",
        "test_other_weights_give_other_samples_and_the_old_ones_the_old",
        "test_sleep_keeps_the_version_and_the_weights",
        "test_samples_that_run_through_a_push_say_so",
        "test_weights_that_came_by_half_are_never_sampled_from",
    )

    class Backend(FakeGenerator):
        _drawn = 0

        def _draw(self, request: SampleRequest, position: int) -> int:
            self._drawn += 1
            return super()._draw(
                request if request.greedy else replace(request, seed=self._drawn), position
            )


class ThePlaceDecides(Clean):
    caught_by = ("test_the_seed_decides_and_not_the_place",)

    class Backend(FakeGenerator):
        def _draw(self, request: SampleRequest, position: int) -> int:
            return super()._draw(
                replace(request, seed=100 * request.ordinal + request.sample), position
            )


class ThePlaceInTheBatchDecides(Clean):
    caught_by = (
        "test_the_seed_decides_and_not_the_place",
        "test_two_batches_in_flight_do_not_mix",
    )

    class Backend(FakeGenerator):
        """The n-th sample of a call draws with the seed of the n-th place."""

        def submit(self, requests: Sequence[SampleRequest]) -> None:
            super().submit(requests)
            self._places = {(r.ordinal, r.sample): place for place, r in enumerate(requests)}

        def _draw(self, request: SampleRequest, position: int) -> int:
            place = self._places.get((request.ordinal, request.sample), request.seed)
            return super()._draw(replace(request, seed=place), position)


class AllSamplesAlike(Clean):
    caught_by = (
        "test_samples_of_a_prompt_differ",
        "test_first_actions_occur_as_often_as_their_logprobs_say",
    )

    class Backend(FakeGenerator):
        def _draw(self, request: SampleRequest, position: int) -> int:
            return super()._draw(replace(request, seed=0), position)


class GreedyIsSampled(Clean):
    caught_by = ("test_greedy_samples_do_not_depend_on_the_seed",)

    class Backend(FakeGenerator):
        def _draw(self, request: SampleRequest, position: int) -> int:
            return super()._draw(replace(request, greedy=False), position)


# -- claims ----------------------------------------------------------------------------------------


class AbortLosesPartials(Clean):
    caught_by = (
        "test_abort_returns_what_there_is",
        "test_an_aborted_answer_is_the_beginning_of_the_whole",
    )

    class Backend(FakeGenerator):
        def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
            empty = np.zeros(0, np.int32)
            return [with_columns(record, action_ids=empty) for record in super().abort(keys)]


class AbortedAnswersHaveNoLogprobs(Clean):
    caught_by = ("test_an_aborted_answer_is_the_beginning_of_the_whole",)

    class Backend(FakeGenerator):
        """Scores an answer only when it ends by itself."""

        def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
            return [
                with_columns(record, logp=np.zeros_like(record.columns["logp"]))
                for record in super().abort(keys)
            ]


class AbortedSamplesComeBack(Clean):
    caught_by = ("test_abort_returns_what_there_is",)

    class Backend(FakeGenerator):
        def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
            running = dict(self._running)
            aborted = super().abort(keys)
            self._running = running
            return aborted


class AbortDoesNothingAndIsNotClaimed(Clean):
    traits = replace(Clean.traits, abort=False, midway_weights=False)
    caught_by = ("test_abort_works_or_refuses",)

    class Backend(FakeGenerator):
        def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
            return []


class ClaimsAFingerprintItLacks(Clean):
    caught_by = (
        "test_a_claim_is_implemented_and_nothing_else",
        "test_the_fingerprint_is_that_of_the_pushed_bytes",
        "test_a_half_loaded_push_shows_in_the_fingerprint",
    )

    class Backend(FakeGenerator):
        fingerprint = None  # type: ignore[assignment]


class SleepDoesNothingAndIsNotClaimed(Clean):
    traits = replace(Clean.traits, sleeps=False, midway_weights=False)
    caught_by = ("test_a_claim_is_implemented_and_nothing_else",)

    class Backend(FakeGenerator):
        def sleep(self) -> None: ...

        def wake(self) -> None: ...


class SleepsWithoutSleeping(Clean):
    caught_by = ("test_sleep_gives_memory_back", "test_who_sleeps_does_not_sample")

    class Backend(FakeGenerator):
        def sleep(self) -> None: ...

        def wake(self) -> None: ...


class WakesWithOtherWeights(Clean):
    caught_by = ("test_sleep_keeps_the_version_and_the_weights",)

    class Backend(FakeGenerator):
        def wake(self) -> None:
            self._logits = fake.initial_logits(1)


# -- weights ---------------------------------------------------------------------------------------


class ReportsAStaleVersion(Clean):
    caught_by = (
        "test_a_record_names_the_version_that_sampled_it",
        "test_samples_that_run_through_a_push_say_so",
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        "test_a_push_before_the_first_action_leaves_nothing_of_the_old_weights",
        "test_two_pushes_cut_a_sample_twice",
        _CUT,
        _NEW,
    )

    class Backend(FakeGenerator):
        """Records are stamped with the version before the last push."""

        _before = 0

        def commit_weights(self, plan: WeightPlan) -> None:
            self._before = self.version
            super().commit_weights(plan)

        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            stale = max(0, self._before - 1), self._before
            record = super()._finished(request, letters, status)
            return replace(record, versions=stale)


class RunsThroughAPushUnnoticed(Clean):
    caught_by = (
        "test_samples_that_run_through_a_push_say_so",
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        "test_two_pushes_cut_a_sample_twice",
        _CUT,
        _NEW,
    )

    class Backend(FakeGenerator):
        """Samples carry the version under which they ended, alone."""

        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            return replace(record, versions=(self.version, self.version))


class ScoresAgainUnderNewWeights(Clean):
    caught_by = (
        "test_samples_that_run_through_a_push_say_so",
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        _CUT,
    )

    class Backend(FakeGenerator):
        """Log-probs are computed when a sample ends, under the weights of then."""

        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            record = super()._finished(request, letters, status)
            return with_columns(
                record, logp=log_softmax(self._logits)[record.columns["action_ids"]]
            )


class IgnoresAPush(Clean):
    caught_by = (
        "test_other_weights_give_other_samples_and_the_old_ones_the_old",
        "test_the_fingerprint_is_that_of_the_pushed_bytes",
        "test_a_half_loaded_push_shows_in_the_fingerprint",
    )

    class Backend(FakeGenerator):
        def commit_weights(self, plan: WeightPlan) -> None:
            self.version = plan.version


class KeepsABucketsMemory(Clean):
    caught_by = (
        "test_the_fingerprint_is_that_of_the_pushed_bytes",
        "test_a_half_loaded_push_shows_in_the_fingerprint",
        "test_other_weights_give_other_samples_and_the_old_ones_the_old",
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        "test_two_pushes_cut_a_sample_twice",
    )

    class Backend(FakeGenerator):
        """Keeps views of memory that is written over after the call."""

        def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
            self._incoming.update({spec.name: array.view(np.float32) for spec, array in tensors})


class UsesAPushBeforeItsEnd(Clean):
    caught_by = ("test_a_half_loaded_push_shows_in_the_fingerprint",)

    class Backend(FakeGenerator):
        def begin_weights(self, plan: WeightPlan) -> None:
            super().begin_weights(plan)
            self.version = plan.version


class AcceptsAnOlderPush(Clean):
    caught_by = ("test_an_older_push_is_refused",)

    class Backend(FakeGenerator):
        def begin_weights(self, plan: WeightPlan) -> None:
            super().begin_weights(WeightPlan(max(plan.version, self.version), plan.tensors))


class AcceptsAnotherModelsPush(Clean):
    caught_by = ("test_a_push_of_another_model_is_refused",)

    class Backend(FakeGenerator):
        def begin_weights(self, plan: WeightPlan) -> None:
            if plan.version < self.version:
                raise WeightMismatch("older")


class RefusesWithoutNamingTheTensor(Clean):
    caught_by = ("test_a_push_of_another_model_is_refused",)

    class Backend(FakeGenerator):
        def begin_weights(self, plan: WeightPlan) -> None:
            try:
                super().begin_weights(plan)
            except WeightMismatch:
                raise WeightMismatch("these are not my weights") from None


class ConstantFingerprint(Clean):
    caught_by = (
        "test_the_fingerprint_is_that_of_the_pushed_bytes",
        "test_a_half_loaded_push_shows_in_the_fingerprint",
    )

    class Backend(FakeGenerator):
        def fingerprint(self) -> dict[str, int]:
            return {name: xxhash.xxh3_64_intdigest(b"") for name in super().fingerprint()}


# -- experts ---------------------------------------------------------------------------------------


def routed(record: Finished, tokens: int) -> Finished:
    """Adds experts of so many tokens: two of four, in three layers."""
    experts = np.tile(np.array([1, 3], np.uint8), (tokens, 3, 1))
    return with_columns(record, routing=experts)


class CleanRouting(Clean):
    traits = replace(Clean.traits, routing=True)

    class Backend(FakeGenerator):
        """Says of each token that was read which experts computed it."""

        def step(self) -> list[Finished]:
            return [
                routed(record, self.read(record)) if record.columns else record
                for record in super().step()
            ]

        def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
            return [routed(record, self.read(record)) for record in super().abort(keys)]

        def read(self, record: Finished) -> int:
            return len(record.columns["prompt_ids"]) + len(record.columns["action_ids"]) - 1


class RoutingIsMissing(CleanRouting):
    caught_by = ("test_records_say_which_experts_computed_their_tokens",)

    Backend = FakeGenerator


class RoutingLeavesThePromptOut(CleanRouting):
    caught_by = (
        "test_records_say_which_experts_computed_their_tokens",
        "test_an_aborted_answer_is_the_beginning_of_the_whole",
    )

    class Backend(CleanRouting.Backend):
        def read(self, record: Finished) -> int:
            return len(record.columns["action_ids"]) - 1


class AbortedAnswersHaveNoRouting(CleanRouting):
    caught_by = ("test_an_aborted_answer_is_the_beginning_of_the_whole",)

    class Backend(CleanRouting.Backend):
        def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
            return FakeGenerator.abort(self, keys)


class RoutingNamesAnExpertTwice(CleanRouting):
    caught_by = ("test_records_say_which_experts_computed_their_tokens",)

    class Backend(CleanRouting.Backend):
        def step(self) -> list[Finished]:
            return [
                with_columns(record, routing=np.zeros_like(record.columns["routing"]))
                if record.columns
                else record
                for record in super().step()
            ]


# -- pushes into samples that run ------------------------------------------------------------------


class KeepsItsTable(Clean):
    """A sample keeps the log-probs of the weights that began it, as from a cache."""

    caught_by = (
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        _CUT,
    )

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            ended = super()._finished(request, letters, status)
            old = self._tables[ended.versions[0]]
            return with_columns(ended, logp=old[np.array(letters, np.int64)])

        def step(self) -> list[Finished]:
            self._tables = getattr(self, "_tables", {})
            if self._logits.size:  # it is awake
                self._tables[self.version] = log_softmax(self._logits)
            return super().step()


class ForgetsTheSecondPush(Clean):
    """From the second version of a sample on, its log-probs stay those of that version."""

    caught_by = ("test_two_pushes_cut_a_sample_twice", _CUT)

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            ended = super()._finished(request, letters, status)
            if ended.versions[1] < ended.versions[0] + 2:
                return ended
            table = self._tables[ended.versions[0] + 1]
            logp = table[np.array(letters, np.int64)]
            logp[0] = ended.columns["logp"][0]
            return with_columns(ended, logp=logp)

        def step(self) -> list[Finished]:
            self._tables = getattr(self, "_tables", {})
            if self._logits.size:  # it is awake
                self._tables[self.version] = log_softmax(self._logits)
            return super().step()


class ReadsThePromptUnderOldWeights(Clean):
    """The first action's log-prob is of the weights that held when the sample was asked for."""

    caught_by = (
        "test_a_push_before_the_first_action_leaves_nothing_of_the_old_weights",
        _NEW,
    )

    class Backend(FakeGenerator):
        def submit(self, requests: Sequence[SampleRequest]) -> None:
            table = log_softmax(self._logits)
            self._at_first = getattr(self, "_at_first", {})
            self._at_first |= {(r.ordinal, r.sample): table for r in requests}
            super().submit(requests)

        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            ended = super()._finished(request, letters, status)
            if not letters:
                return ended
            logp = ended.columns["logp"].copy()
            logp[0] = self._at_first[request.ordinal, request.sample][letters[0]]
            return with_columns(ended, logp=logp)


class NamesNoVersions(Clean):
    """Nothing in a record that was cut says which version sampled which action."""

    caught_by = (_CUT,)

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            ended = super()._finished(request, letters, status)
            columns = {name: array for name, array in ended.columns.items() if name != VERSION}
            return replace(ended, columns=columns)


class NamesVersionsOfEveryRecord(Clean):
    """A record of one version has the column of versions, too."""

    caught_by = (_CUT,)

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            ended = super()._finished(request, letters, status)
            column = action_versions(ended.columns, len(letters), ended.versions[0])
            return with_columns(ended, version=column)


class NamesVersionsAnActionLate(Clean):
    """The first action behind a cut counts as one of the older weights."""

    caught_by = (_CUT,)

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            ended = super()._finished(request, letters, status)
            column = ended.columns.get(VERSION)
            if column is None or column[-2] != column[-1]:  # the last action would say it, too
                return ended
            return with_columns(ended, version=np.concatenate([column[:1], column[:-1]]))


class NamesVersionsAnActionEarly(Clean):
    """The last action before a cut counts as one of the newer weights."""

    caught_by = (_CUT,)

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            ended = super()._finished(request, letters, status)
            column = ended.columns.get(VERSION)
            if column is None or column[0] != column[1]:  # the first action would say it, too
                return ended
            return with_columns(ended, version=np.concatenate([column[1:], column[-1:]]))


class ForgetsTheVersionBetween(Clean):
    """Of three versions the one in the middle is left out: it keeps but the first and the last."""

    caught_by = (_CUT,)

    class Backend(FakeGenerator):
        def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
            ended = super()._finished(request, letters, status)
            if VERSION not in ended.columns:
                return ended
            first, last = ended.versions
            column = ended.columns[VERSION]
            return with_columns(ended, version=np.where(column == first, first, last).astype("i4"))


# -- caches of what was read -----------------------------------------------------------------------


class Caching(FakeGenerator):
    """A letter depends on all that was read before it, each token under the weights of then.

    It reads no more than 10,000 characters.
    """

    def __init__(self, config: fake.FakeGeneratorConfig, context: WorkerContext) -> None:
        super().__init__(config, context)
        # Key of a running sample -> what reading each of its tokens has added to the logits.
        self._caches: dict[tuple[int, int], list[np.ndarray]] = {}
        self._refused: list[Finished] = []  # the next step returns them

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        fitting = []
        for request in requests:
            if len(request.prompt.text or "") <= 10_000:
                fitting.append(request)
                continue
            versions = (self.version, self.version)
            self._refused.append(
                Finished(request=request, status=FAILED, versions=versions, reason="too_long")
            )
        super().submit(fitting)

    def step(self) -> list[Finished]:
        """Gives each sample a letter in a step of its own, with its own logits."""
        ended, self._refused = self._refused, []
        if not self._logits.size or not self._running:
            return ended + super().step()
        running, weights = self._running, self._logits
        for key, one in running.items():
            self._running = {key: one}
            self._logits = self._next_logits(key, *one)
            ended += super().step()
            self._logits = weights
        over = {(record.request.ordinal, record.request.sample) for record in ended}
        self._running = {key: one for key, one in running.items() if key not in over}
        return ended

    def _next_logits(
        self, key: tuple[int, int], request: SampleRequest, letters: list[int]
    ) -> np.ndarray:
        cache = self._caches.setdefault(key, [])
        tokens = [*(request.prompt.text or "").encode(), *letters]
        cache += [self._read(token) for token in tokens[len(cache) :]]
        return self._logits + _sum(cache)

    def _read(self, token: int) -> np.ndarray:
        return np.asarray(3 * np.roll(self._logits, token), np.float32)

    def _finished(self, request: SampleRequest, letters: list[int], status: str) -> Finished:
        self._caches.pop((request.ordinal, request.sample), None)
        return super()._finished(request, letters, status)

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        scored = []
        for record in records:
            actions = record["action_ids"].tolist()
            tokens = [*record["prompt_ids"].tolist(), *actions]
            first = len(tokens) - len(actions)
            reads = [self._read(token) for token in tokens]
            tables = [
                log_softmax(self._logits + _sum(reads[: first + i])) for i in range(len(actions))
            ]
            pairs = zip(tables, actions, strict=True)
            scored.append(np.array([table[letter] for table, letter in pairs], np.float32))
        return scored

    def sleep(self) -> None:
        super().sleep()
        self._caches.clear()

    def commit_weights(self, plan: WeightPlan) -> None:
        super().commit_weights(plan)
        self._caches.clear()


def _sum(reads: Sequence[np.ndarray]) -> np.ndarray:
    """Adds up what tokens add to the logits, float32[V]: about as much for long texts as for short
    ones.
    """
    zero = np.zeros(len(fake.VOCABULARY), np.float32)
    total = np.sum(reads, axis=0, dtype=np.float32) if reads else zero
    return np.asarray(total / np.float32(max(1, len(reads)) ** 0.5), np.float32)


class CleanCaching(Clean):
    Backend: ClassVar[type[FakeGenerator]] = Caching


class KeepsCaches(CleanCaching):
    """Samples go on through a push over what older weights have read."""

    caught_by = (
        "test_a_push_cuts_a_sample_in_old_and_new_logprobs",
        "test_two_pushes_cut_a_sample_twice",
        _CUT,
    )

    class Backend(Caching):
        def commit_weights(self, plan: WeightPlan) -> None:
            FakeGenerator.commit_weights(self, plan)


class KeepsWhatItHasReadOfPrompts(CleanCaching):
    """A new sample takes what an earlier one has read of a long prompt, under whatever weights."""

    caught_by = (_NEW,)

    class Backend(Caching):
        def _next_logits(
            self, key: tuple[int, int], request: SampleRequest, letters: list[int]
        ) -> np.ndarray:
            self._shared = getattr(self, "_shared", {})
            prompt = request.prompt.text or ""
            if not letters and prompt in self._shared:
                self._caches[key] = list(self._shared[prompt])
            logits = super()._next_logits(key, request, letters)
            if len(prompt) >= 64:  # shorter ones fill no block
                self._shared.setdefault(prompt, self._caches[key][: len(prompt)])
            return logits
