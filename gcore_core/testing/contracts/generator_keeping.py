"""The part of a generator's contract about samples that go on over what is cached of them.

Log-probs behind such a push are those of no weights: newer ones over what older ones have cached.
No generator can be asked for them once more. So the tests say what they must be where that is
known, and what they must not be elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gcore_core.contract.columns import action_versions
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, Prompt
from gcore_core.testing.contracts.base import claims
from gcore_core.testing.contracts.generator_midway import (
    TRIES,
    MidwayTests,
    name_of,
    scored,
    without_media,
)
from gcore_core.testing.contracts.weights import perturbed, push
from gcore_core.testing.safetensors_files import Tensors

#: Prompts get about so many characters where engines are to share what they have cached of them.
#: Some share whole blocks alone.
_SHARED_CHARACTERS = 80


class KeepingTests(MidwayTests):
    """Tests of pushes that keep caches, which are mixed into ``GeneratorContract``."""

    @claims("weights.midway.keep")
    def test_the_same_weights_over_kept_caches_change_nothing(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """What is cached is then right for the new weights, so all log-probs are theirs.

        A cache that was lost or moved, or is read at other positions, gives others.
        """
        self.asks_for_scores()
        for _ in range(TRIES):
            before = generator.version + 1
            records = self._kept(generator, requests, (weights, weights), before)
            self._check_versions(records)
            scorable = without_media(records)
            for record, expected in zip(scorable, scored(generator, scorable), strict=True):
                self._check_logprobs(record, expected, record.versions, "the weights")
            if any(record.versions == (before, before + 1) for record in records):
                return
        pytest.fail("no sample went on through the push: let samples be longer")

    @claims("weights.midway.keep")
    def test_over_kept_caches_the_new_weights_sample(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """The column "version" says where they begin: actions before have the old log-probs.

        What the first action behind a cut has is not known, but it is not the old log-prob. One in
        two may have it by chance, as actions have that are all but certain under both weights.
        """
        self.asks_for_scores()
        other = perturbed(weights)
        for _ in range(TRIES):
            before = generator.version + 1
            records = self._kept(generator, requests, (weights, other), before)
            self._check_versions(records)
            cut = [record for record in records if record.versions == (before, before + 1)]
            scorable = without_media(cut)
            push(generator, weights, before + 2)
            old_at_first = 0
            for record, old in zip(scorable, scored(generator, scorable), strict=True):
                self._check_logprobs(record, old, (before,), "the old weights")
                first = int(np.argmax(record.columns["version"] > before))
                told = record.columns["logp"][first]
                old_at_first += bool(abs(told - old[first]) <= self.tolerance)
            if scorable:
                assert old_at_first <= len(scorable) / 2, (
                    f"{old_at_first} of {len(scorable)} samples went on with the log-probs of the "
                    "old weights"
                )
            if cut:
                return
        pytest.fail("no sample went on through the push: let samples be longer")

    @claims("weights.midway.keep")
    def test_a_push_that_keeps_nothing_has_kept_caches_read_again(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """Behind it log-probs are those of its weights, whatever the push before it kept."""
        self.asks_for_scores()
        other = perturbed(weights)
        third = perturbed(other)
        for _ in range(TRIES):
            before = generator.version + 1
            push(generator, weights, before)
            with self.held(generator):
                generator.submit(requests)
                records = generator.step()
                push(generator, other, before + 1, keeps=True)
                records += generator.step()
                push(generator, third, before + 2)
            records += self.drain(generator, requests, records)
            self._check_versions(records)
            cut = [record for record in records if record.versions == (before, before + 2)]
            scorable = without_media(cut)
            for record, new in zip(scorable, scored(generator, scorable), strict=True):
                self._check_logprobs(record, new, (before + 2,), "the weights that read all again")
            if cut:
                return
        pytest.fail("no sample went on through both pushes: let samples be longer")

    @claims("weights.midway.keep")
    def test_new_samples_use_nothing_that_older_weights_have_cached(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """They show prompts that samples still run of, and are as if these were not there.

        Some are asked for before the push, when no step is made any more.
        """
        self.asks_for_scores()
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
            push(generator, perturbed(weights), before + 1, keeps=True)
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
        self._check_all_new(generator, new, before + 1)

    @claims("weights.midway.keep")
    def test_samples_without_actions_keep_nothing(
        self, generator: Any, requests: list[SampleRequest], weights: Tensors
    ) -> None:
        """Their log-probs and versions are those of the new weights alone.

        A record of one version is compared with the trainer's log-probs.
        """
        self.asks_for_scores()
        before = generator.version
        generator.submit(requests)
        push(generator, perturbed(weights), before + 1, keeps=True)
        self._check_all_new(generator, self.drain(generator, requests), before + 1)

    def _kept(
        self,
        generator: Any,
        requests: list[SampleRequest],
        weights: tuple[Tensors, Tensors],
        before: int,
    ) -> list[Finished]:
        """Samples through one push that keeps caches; returns all records.

        weights: of the versions ``before`` and ``before`` + 1. An engine that several tests share
            may hold what an earlier one has pushed, so both are pushed.
        """
        push(generator, weights[0], before)
        with self.held(generator):
            generator.submit(requests)
            records = [record for _ in range(2) for record in generator.step()]
            push(generator, weights[1], before + 1, keeps=True)
        return records + self.drain(generator, requests, records)

    def _check_all_new(self, generator: Any, records: list[Finished], version: int) -> None:
        """All actions of the records have log-probs of the weights that the generator holds."""
        assert {record.versions for record in records} == {(version, version)}
        scorable = without_media(records)
        for record, expected in zip(scorable, scored(generator, scorable), strict=True):
            self._check_logprobs(record, expected, (version,), "the new weights")

    def _check_versions(self, records: Iterable[Finished]) -> None:
        for record in records:
            self.check_version_column(record)

    def _check_logprobs(
        self, record: Finished, expected: np.ndarray, versions: Sequence[int], what: str
    ) -> None:
        """Actions that one of these versions sampled have the log-probs float32[A] expected."""
        columns = record.columns
        named = action_versions(columns, len(columns["logp"]), record.versions[0])
        held = np.isin(named, versions) & (columns["action_mask"] > 0)
        apart = abs(columns["logp"] - expected)[held]
        assert apart.max(initial=0.0) <= self.tolerance, (
            f"{name_of(record)}: an action that version {max(versions)} or an older one sampled "
            f"does not have the log-prob of {what}"
        )


def _long(prompt: Prompt) -> Prompt:
    """Returns the prompt with its text repeated; one that shows images stays as it is."""
    if not prompt.text or prompt.images:
        return prompt
    times = -(-_SHARED_CHARACTERS // len(prompt.text))
    return msgspec.structs.replace(prompt, text=prompt.text * times)
