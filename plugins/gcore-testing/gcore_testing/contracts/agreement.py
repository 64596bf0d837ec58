"""The contract of a trainer and a generator together.

After a push, both give the same log-probs for the same actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt
from gcore_core.contract.trainer import TrainRecord
from gcore_testing.contracts.adapters import PairWithAdapters
from gcore_testing.contracts.base import closing, described, make
from gcore_testing.contracts.generator import requests_of
from gcore_testing.contracts.trainer import PolicyGradient, train
from gcore_testing.contracts.weights import digests, exported, push


class TrainerWithGeneratorContract(PairWithAdapters):
    """To test such a pair, override ``provider`` with a plugin that has both, or both fixtures.

    config: settings of the trainer.
    generator_config: settings of the generator.
    generator_provider: as in ``use``, if the generator is of another plugin, such as "torch".
    tolerance: the largest difference of log-probs over all actions, in nats.
    samples: number of samples for each prompt.
    """

    kind: ClassVar[str] = "trainer"
    tolerance: ClassVar[float] = 1e-4
    generator_provider: ClassVar[Any] = None
    generator_config: ClassVar[Mapping[str, Any]] = {}
    samples: ClassVar[int] = 6

    @pytest.fixture
    def trainer(self, context: WorkerContext) -> Iterator[Any]:
        parts = {"objective": PolicyGradient()}
        yield from closing(self.build(replace(context, role="policy", parts=parts)))

    @pytest.fixture
    def generator(self, context: WorkerContext) -> Iterator[Any]:
        spec = (
            described(self.generator_provider, "generator")
            if self.generator_provider
            else self.description("generator")
        )
        yield from closing(make(spec, self.generator_config, replace(context, role="rollout")))

    @pytest.fixture
    def prompts(self) -> list[Prompt]:
        return [
            Prompt(row=row, text=text) for row, text in enumerate(["1+2=", "7", "12+34=", "5+6+7="])
        ]

    @pytest.fixture
    def requests(self, prompts: list[Prompt]) -> list[SampleRequest]:
        return requests_of(prompts, self.samples)

    def test_before_the_first_push_they_agree(
        self, trainer: Any, generator: Any, requests: list[SampleRequest]
    ) -> None:
        """They agree because both were made from one model."""
        assert self._gap(trainer, sampled(generator, requests)) <= self.tolerance

    def test_after_each_push_they_agree(
        self, trainer: Any, generator: Any, requests: list[SampleRequest]
    ) -> None:
        for version in (1, 2):
            self._gap(trainer, sampled(generator, requests), step=version - 1)
            push(generator, exported(trainer), version)
            records = sampled(generator, requests)
        assert self._gap(trainer, records, step=2) <= self.tolerance

    def test_a_push_that_did_not_come_shows_as_a_gap(
        self, trainer: Any, generator: Any, requests: list[SampleRequest]
    ) -> None:
        records = sampled(generator, requests)
        for step in range(3):
            self._gap(trainer, records, step=step)
        assert self._gap(trainer, records, step=3) > self.tolerance, (
            "three updates changed no log-prob"
        )

    def test_the_generator_holds_the_exported_bytes(
        self, trainer: Any, generator: Any, requests: list[SampleRequest]
    ) -> None:
        if not hasattr(generator, "fingerprint"):
            self.not_claimed("fingerprints")
        self._gap(trainer, sampled(generator, requests))
        pushed = exported(trainer)
        version = trainer.version
        push(generator, pushed, version)
        assert generator.fingerprint() == digests(pushed)

    def sampled_by(self, generator: Any, requests: list[SampleRequest]) -> list[TrainRecord]:
        return sampled(generator, requests)

    def gap_of(self, trainer: Any, records: list[TrainRecord], *, step: int = 0) -> float:
        return self._gap(trainer, records, step=step)

    def objective(self) -> Any:
        return PolicyGradient()

    def _gap(self, trainer: Any, records: list[TrainRecord], *, step: int = 0) -> float:
        """Trains one step on the records.

        Returns the largest difference between their log-probs and the trainer's before the step.
        """
        advantages = np.where(np.arange(len(records)) % 2, 1.0, -0.5)
        return train(trainer, records, advantages, step=step)["logprob_gap_max"]


def sampled(generator: Any, requests: list[SampleRequest]) -> list[TrainRecord]:
    """Returns the generator's records for the requests, sorted, as a trainer gets them."""
    generator.submit(requests)
    ended: list[Any] = []
    while len(ended) < len(requests):
        ended += generator.step()
    return train_records(ended)


def train_records(finished: Iterable[Finished]) -> list[TrainRecord]:
    """Returns a generator's records, sorted, as a trainer gets them."""
    records = [
        TrainRecord(
            ordinal=r.request.ordinal,
            sample=r.request.sample,
            minibatch=0,
            columns=r.columns,
            media=r.media,
        )
        for r in finished
    ]
    return sorted(records, key=lambda record: (record.ordinal, record.sample))
