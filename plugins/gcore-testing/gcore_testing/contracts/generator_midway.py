"""The part of a generator's contract about samples that go on through a push."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest

from gcore_core.contract.columns import VERSION, version_problem
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import FAILED, Prompt
from gcore_testing.contracts.base import claims
from gcore_testing.contracts.draining import Drains
from gcore_testing.contracts.weights import perturbed, push
from gcore_testing.safetensors_files import Tensors

if TYPE_CHECKING:
    from gcore_core.contract.generator import Finished

#: Columns by which actions are scored; not "routing", which holds what older weights chose.
_ASKED = ("prompt_ids", "action_ids", "logp", "action_mask", "temperature")
#: How often samples are drawn until one of them runs on through the pushes: an engine that does not
#: wait for steps may have ended all of them before.
_TRIES = 5
#: Prompts get about so many characters where engines are to share what they have cached of them.
#: Some share whole blocks alone.
_SHARED_CHARACTERS = 80


class MidwayTests(Drains):
    """Tests of pushes into samples that run, which are mixed into ``GeneratorContract``.

    That class has the tolerance.
    """

    tolerance: ClassVar[float]

    def _asks_for_scores(self) -> None:
        if not self.claimed().scores_logprobs:
            self.not_claimed(
                "scores_logprobs, by which actions on both sides of a cut are scored again"
            )

    @claims("midway_weights")
    def test_a_push_cuts_a_sample_in_old_and_new_logprobs(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """Actions before the cut have log-probs of the old weights, those behind it of the new.

        The latter are given all that was sampled before, read again under the new weights.
        """
        self._asks_for_scores()
        for _ in range(_TRIES):
            before = generator.version
            with self.held(generator):
                generator.submit(requests)
                ended = [record for _ in range(2) for record in generator.step()]
                push(generator, perturbed(weights), before + 1)
            later = self.drain(generator, requests, ended)
            cut = [record for record in later if record.versions == (before, before + 1)]
            scorable = without_media(cut)
            new = _scored(generator, scorable)
            push(generator, weights, before + 2)
            if cut:
                self._check(scorable, [_scored(generator, scorable), new])
                return
        pytest.fail("no sample went on through the push: let samples be longer")

    @claims("midway_weights")
    def test_two_pushes_cut_a_sample_twice(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        self._asks_for_scores()
        for _ in range(_TRIES):
            before = generator.version
            with self.held(generator):
                generator.submit(requests)
                ended = generator.step()
                push(generator, perturbed(weights), before + 1)
                ended += generator.step()
                push(generator, weights, before + 2)
            later = self.drain(generator, requests, ended)
            cut = [record for record in later if record.versions == (before, before + 2)]
            if cut:
                scorable = without_media(cut)
                old = _scored(generator, scorable)
                push(generator, perturbed(weights), before + 3)
                self._check(scorable, [old, _scored(generator, scorable), old])
                return
        pytest.fail("no sample went on through both pushes: let samples be longer")

    @claims("midway_weights")
    def test_a_push_before_the_first_action_leaves_nothing_of_the_old_weights(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """Not in its log-probs, and not in its versions: what was read of the prompt goes, too."""
        self._asks_for_scores()
        before = generator.version
        generator.submit(requests)
        push(generator, perturbed(weights), before + 1)
        later = self.drain(generator, requests)
        assert {record.versions for record in later} == {(before + 1, before + 1)}
        scorable = without_media(later)
        self._check(scorable, [_scored(generator, scorable)])

    @claims("midway_weights")
    def test_a_record_that_was_cut_says_which_version_sampled_each_action(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """By the column "version": the log-prob of each action is that of the version it names.

        Each of two pushes brings other weights, and no version names the weights of another.
        Records of one version have no such column.
        """
        self._asks_for_scores()
        other = perturbed(weights)
        for _ in range(_TRIES):
            # An engine that several tests share may hold what an earlier one has pushed.
            before = generator.version + 1
            push(generator, weights, before)
            with self.held(generator):
                generator.submit(requests)
                records = [record for _ in range(2) for record in generator.step()]
                push(generator, other, before + 1)
                records += [record for _ in range(2) for record in generator.step()]
                push(generator, perturbed(other), before + 2)
            records += self.drain(generator, requests, records)
            for record in records:
                self._check_version_column(record)
            cut = without_media(r for r in records if r.versions[0] != r.versions[1])
            parts = {before + 2: _scored(generator, cut)}
            push(generator, other, before + 3)
            parts[before + 1] = _scored(generator, cut)
            push(generator, weights, before + 4)
            parts[before] = _scored(generator, cut)
            for number, record in enumerate(cut):
                of_version = {version: scores[number] for version, scores in parts.items()}
                self._check_actions(record, of_version)
            if any(r.versions[0] != r.versions[1] for r in records):
                return
        pytest.fail("no sample went on through a push: let samples be longer")

    @claims("midway_weights")
    def test_new_samples_use_nothing_that_older_weights_have_cached(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """They show prompts that samples still run of, and are as if these were not there.

        Some are asked for before the push, when no step is made any more.
        """
        self._asks_for_scores()
        count = len(requests)
        early = [replace(request, prompt=_long(request.prompt)) for request in requests]
        waiting = [replace(request, sample=request.sample + count) for request in early]
        late = [replace(request, sample=request.sample + 2 * count) for request in early]
        before = generator.version + 1
        push(generator, weights, before)
        with self.held(generator):
            generator.submit(early)
            ended = [record for _ in range(2) for record in generator.step()]
            generator.submit(waiting)
            push(generator, perturbed(weights), before + 1)
        generator.submit(late)
        records = self.drain(generator, [*early, *waiting, *late], ended)
        sampled = [record for record in records if record.status != FAILED]
        behind = [record for record in sampled if record.request.sample >= 2 * count]
        assert behind, f"no prompt of {_SHARED_CHARACTERS} characters could be answered"
        # An engine that does not wait for steps may have begun some of those that waited.
        new = [record for record in sampled if record.versions[0] == before + 1]
        assert {id(record) for record in behind} <= {id(record) for record in new}, (
            "a sample that was asked for behind the push names the older weights"
        )
        scorable = without_media(new)
        self._check(scorable, [_scored(generator, scorable)])

    def _check_version_column(self, record: Finished) -> None:
        """A record has a sound column "version" where more than one version sampled it."""
        first, last = record.versions
        if first == last:
            assert VERSION not in record.columns, (
                f"{_name_of(record)}: one version sampled it, and it has the column {VERSION!r}"
            )
            return
        assert VERSION in record.columns, (
            f"{_name_of(record)}: versions {first} to {last} sampled it, and it has no column "
            f"{VERSION!r}"
        )
        column = record.columns[VERSION]
        actions = record.columns["action_ids"].size
        problem = version_problem(column, actions, record.versions)
        assert not problem, f"{_name_of(record)}: {problem}"
        assert column[-1] == last, (
            f"{_name_of(record)}: version {last} did not sample its last action"
        )

    def _check_actions(self, record: Finished, of_version: Mapping[int, np.ndarray]) -> None:
        """Each action has the log-prob of its version.

        of_version: version -> log-probs float32[A] of the record's actions under its weights.
        """
        columns = record.columns
        expected = np.choose(
            columns[VERSION] - min(of_version), [of_version[one] for one in sorted(of_version)]
        )
        apart = abs(columns["logp"] - expected)[columns["action_mask"] > 0]
        assert apart.max(initial=0.0) <= self.tolerance, (
            f"{_name_of(record)}: an action's log-prob is not of the version that its column "
            f"{VERSION!r} names"
        )

    def _check(self, records: list[Finished], parts: Sequence[list[np.ndarray]]) -> None:
        """Each record's log-probs are those of the parts one after the other, each of some actions.

        parts: for each version in turn, log-probs float32[A] of each record's actions under it.
        """
        for number, record in enumerate(records):
            logp = record.columns["logp"]
            trained = record.columns["action_mask"] > 0
            fits = [abs(logp - part[number]) <= self.tolerance for part in parts]
            fits = [fit | ~trained for fit in fits]
            assert _can_be_cut(fits), (
                f"{_name_of(record)}: no cut divides its log-probs in those of older and those of "
                "newer weights"
            )


def _name_of(record: Finished) -> str:
    return f"ordinal {record.request.ordinal}, sample {record.request.sample}"


def without_media(records: Iterable[Finished]) -> list[Finished]:
    """Returns the records whose columns hold all that the model has read.

    Only of these can log-probs be asked for: an image is no column, but media of its record. Where
    every sample that was cut shows an image, a test holds their versions alone.
    """
    return [record for record in records if not record.media]


def _scored(generator: Any, records: list[Finished]) -> list[np.ndarray]:
    """Returns the log-probs float32[A] of each record's actions under the present weights."""
    asked = [{name: record.columns[name] for name in _ASKED} for record in records]
    found: list[np.ndarray] = generator.logprobs(asked)
    return found


def _long(prompt: Prompt) -> Prompt:
    """Returns the prompt with its text repeated; one that shows images stays as it is."""
    if not prompt.text or prompt.images:
        return prompt
    times = -(-_SHARED_CHARACTERS // len(prompt.text))
    return msgspec.structs.replace(prompt, text=prompt.text * times)


def _can_be_cut(fits: Sequence[np.ndarray]) -> bool:
    """Returns whether actions can be divided into consecutive parts that each fit theirs.

    The first part and the last one have at least one action.
    A part in between may be empty, since two pushes may come between the same two actions.

    fits: for each part, bool[A]: whether an action has the part's log-prob.
    """
    count = len(fits[0])
    ends = {0}  # how many actions the parts so far can have in all
    for number, fit in enumerate(fits):
        least = 1 if number in (0, len(fits) - 1) else 0
        longer = set[int]()
        for begin in ends:
            # The part may end behind any action up to the first one that does not fit.
            wrong = np.flatnonzero(~fit[begin:])
            limit = begin + int(wrong[0]) if len(wrong) else count
            longer.update(range(begin + least, limit + 1))
        ends = longer
    return count in ends
