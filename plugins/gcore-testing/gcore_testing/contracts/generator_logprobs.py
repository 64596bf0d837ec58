"""The part of a generator's contract about its log-probs that needs neither a model nor a claim.

Samples are compared with samples: those that begin alike tell the same log-probs, and the first
actions occur as often as their log-probs say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import FINISHED, Prompt
from gcore_testing.contracts.draining import Drains
from gcore_testing.contracts.weights import push, scaled

if TYPE_CHECKING:
    from gcore_core.contract.generator import Finished

#: Probability that the frequencies of a right generator are called wrong. Seeds are fixed, so the
#: outcome for one generator and one model stays the same.
FALSE_ALARMS = 1e-6
#: Weights are multiplied by it before frequencies are counted: the policies of small models are
#: close to uniform, and from those wrong temperatures cannot be told.
SHARPEN = 4.0


class LogprobTests(Drains):
    """Tests of log-probs, which are mixed into ``GeneratorContract``.

    draws: number of samples of which log-probs are compared and first actions are counted.
    """

    draws: ClassVar[int] = 512

    def test_the_same_action_has_the_same_logprob(
        self, generator: Any, prompts: list[Prompt]
    ) -> None:
        """Samples of one prompt and version that begin alike agree on the next log-prob.

        They agree wherever they have the same next action. Masked actions are not compared.
        """
        records = self.run(generator, _draws(prompts, self.draws // len(prompts)))
        told: dict[tuple[Any, ...], float] = {}
        compared = 0
        for record in records.values():
            for place, logp in _trained(record):
                beginning = record.columns["action_ids"][: place + 1]
                key = (record.request.ordinal, *record.versions, beginning.tobytes())
                compared += key in told
                first = told.setdefault(key, logp)
                assert abs(logp - first) <= self.tolerance, (
                    f"after the same {place} actions of prompt {record.request.ordinal}, action "
                    f"{beginning[-1]} has the log-prob {first:.6g} in one sample and {logp:.6g} in "
                    "another"
                )
        assert compared, f"of {self.draws} samples no two begin alike: let `draws` be larger"

    def test_first_actions_occur_as_often_as_their_logprobs_say(
        self, generator: Any, prompts: list[Prompt], request: pytest.FixtureRequest
    ) -> None:
        """The first actions of many seeds are counted and compared with their probabilities.

        Half of the samples tell the probabilities, the other half is counted. Each action and each
        set of the k most probable ones is held to the binomial distribution by an exact test.
        All of them together raise a false alarm with a probability of 1e-6 at most.
        """
        with self._sharpened(generator, request):
            records = self.run(generator, _draws(prompts[:1], self.draws))
        # In the order of the seeds: short samples end first, and begin with other actions.
        ordered = [records[key] for key in sorted(records)]
        firsts = [(int(r.columns["action_ids"][0]), logp) for r in ordered for logp in _first(r)]
        half = len(firsts) // 2
        assert half, "no sample's first action is trained"
        probabilities = {action: math.exp(logp) for action, logp in firsts[:half]}
        total = sum(probabilities.values())
        assert total <= math.exp(self.tolerance) + 1e-6, (
            f"the probabilities of {len(probabilities)} first actions sum to {total:.4g}"
        )
        counted = [action for action, _ in firsts[half:]]
        if wrong := _unlikely(probabilities, counted):
            pytest.fail(wrong)

    def test_a_temperature_that_is_set_is_told_and_changes_the_logprobs(
        self, generator: Any, prompts: list[Prompt], request: pytest.FixtureRequest
    ) -> None:
        """The most probable action is more probable below temperature 1, and less above it.

        Its log-prob at temperature 1 is that of the greedy record.
        """
        temperature = float(self.config.get("temperature", 1))
        if temperature == 1:
            self.not_claimed("a `temperature` other than 1 in `config`")
        with self._sharpened(generator, request):
            drawn = self.run(generator, _draws(prompts[:1], self.draws))
            asked = SampleRequest(ordinal=0, sample=0, seed=1, prompt=prompts[0], greedy=True)
            (greedy,) = self.run(generator, [asked]).values()
        told = {float(record.columns["temperature"]) for record in drawn.values()}
        assert told == {float(np.float32(temperature))}, (
            f"`config` has temperature {temperature}, and the records' column says {sorted(told)}"
        )
        best = int(greedy.columns["action_ids"][0])
        alike = [r for r in drawn.values() if r.columns["action_ids"][0] == best]
        assert alike, (
            f"no sample begins with the most probable action {best}: let `draws` be larger"
        )
        for record in alike:
            for logp in _first(record):
                rise = logp - float(greedy.columns["logp"][0])
                assert rise * (1 - temperature) > 0, (
                    f"action {best} has the log-prob {logp:.6g} at temperature {temperature}, and "
                    f"{logp - rise:.6g} at 1"
                )

    def test_the_end_token_is_trained_on(self, generator: Any, prompts: list[Prompt]) -> None:
        """The action that ends a sample is not masked: else a policy never learns to stop."""
        records = self.run(generator, _draws(prompts, self.draws // len(prompts)))
        ended = [record for record in records.values() if record.status == FINISHED]
        if not ended:
            self.not_claimed(f"samples that end (none of {len(records)} did)")
        masked = [record for record in ended if not record.columns["action_mask"][-1:].all()]
        assert not masked, (
            f"the last action of {len(masked)} of {len(ended)} finished records is masked"
        )

    @contextmanager
    def _sharpened(self, generator: Any, request: pytest.FixtureRequest) -> Iterator[None]:
        """Has the generator hold a policy that is less uniform, where it takes weights."""
        weights = request.getfixturevalue("weights") if self.claimed().receives_weights else None
        if weights:
            push(generator, scaled(weights, SHARPEN), generator.version + 1)
        try:
            yield
        finally:
            if weights:
                push(generator, weights, generator.version + 1)


def _draws(prompts: Sequence[Prompt], samples: int) -> list[SampleRequest]:
    """Makes ``samples`` requests for every prompt, with seeds of 63 bits as a run has them."""
    seeds = np.random.default_rng(0).integers(2**63, size=(len(prompts), samples))
    return [
        SampleRequest(ordinal=ordinal, sample=sample, seed=int(seed), prompt=prompt)
        for ordinal, prompt in enumerate(prompts)
        for sample, seed in enumerate(seeds[ordinal])
    ]


def _trained(record: Finished) -> list[tuple[int, float]]:
    """Returns place and log-prob of each trained action; another test compares the lengths."""
    columns = record.columns
    rows = zip(columns["logp"].tolist(), columns["action_mask"].tolist(), strict=False)
    return [(place, logp) for place, (logp, mask) in enumerate(rows) if mask]


def _first(record: Finished) -> list[float]:
    """Returns the log-prob of the first action, or nothing when that is not trained."""
    return [logp for place, logp in _trained(record)[:1] if place == 0]


def _unlikely(probabilities: Mapping[int, float], counted: Sequence[int]) -> str:
    """Says which actions occur too rarely or too often; "" when none does."""
    ordered = sorted(probabilities, key=lambda action: -probabilities[action])
    sets = [([action], f"action {action}") for action in ordered]
    sets += [(ordered[:k], f"the {k} most probable actions") for k in range(2, len(ordered) + 1)]
    for actions, name in sets:
        probability = min(1.0, sum(probabilities[action] for action in actions))
        members = set(actions)
        count = sum(action in members for action in counted)
        if _tail(count, len(counted), probability) < FALSE_ALARMS / len(sets):
            return (
                f"{name}: first of {count} samples out of {len(counted)}, and by the log-probs "
                f"{probability * len(counted):.1f} were to be expected"
            )
    return ""


def _tail(count: int, draws: int, probability: float) -> float:
    """Returns the two-sided p-value of ``count`` under the binomial distribution."""
    if probability >= 1:
        return float(count == draws)
    if probability <= 0:
        return float(count == 0)
    chances = [
        math.exp(
            math.lgamma(draws + 1)
            - math.lgamma(k + 1)
            - math.lgamma(draws - k + 1)
            + k * math.log(probability)
            + (draws - k) * math.log1p(-probability)
        )
        for k in range(draws + 1)
    ]
    return min(1.0, 2 * min(sum(chances[: count + 1]), sum(chances[count:])))
