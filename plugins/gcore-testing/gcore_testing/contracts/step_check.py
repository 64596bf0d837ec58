"""The contract of a step check.

A gap over the band ends the run and names the replica, whoever can be asked; equal log-probs do
not; metrics that it is given stay; a resumed run checks alike; and nothing goes on after the end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, cast

import msgspec
import numpy as np
import pytest

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.providers import SentinelProvider
from gcore_core.contract.sentinel import Compared, Finding, Sentinel, SentinelContext
from gcore_core.contract.step_check import Held, StepCheck, StepCheckContext
from gcore_testing.contracts.base import Contract, make
from gcore_testing.contracts.sentinel import compared, evidence_of, shifted

T = TypeVar("T")


class FakeWorkers:
    """Two generators and a trainer that can be asked, or that all sleep.

    gap: in nats, by which generator 1 is off when it scores records again.
    asleep: nobody says anything.
    """

    def __init__(self, *, gap: float = 0.0, asleep: bool = False) -> None:
        self.generators: Sequence[str] = ["rollout.0", "rollout.1"]
        self.both_score = not asleep
        self.scored: list[int] = []  # versions that generators were asked to score under
        self._gap = gap
        self._asleep = asleep

    async def scored_by_trainer(self, version: int, count: int) -> list[Compared]:
        records = compared(version)[:count]
        return [replace(record, replica=-1, version=version) for record in records]

    async def scored_by_generators(
        self, version: int, records: Sequence[Compared]
    ) -> list[Compared]:
        self.scored.append(version)
        await asyncio.sleep(0)
        right = [replace(record, replica=0) for record in records]
        wrong = [replace(record, replica=1) for record in shifted(records, self._gap)]
        return [*right, *wrong]

    async def found_by_ranks(self, step: int, replicas: Sequence[int]) -> list[Finding]:
        return []

    async def shown_by_ranks(self, step: int, replicas: Sequence[int]) -> list[Compared]:
        return [] if self._asleep else compared(step)

    async def found_by_generator(
        self, replica: int, records: Sequence[Compared]
    ) -> list[Finding] | None:
        return None if self._asleep else []

    async def held_by_generator(self, replica: int) -> Held | None:
        return None if self._asleep else Held(version=5)


class StepCheckContract(Contract):
    """To test the step check of a sentinel, override ``provider``, or the method ``made``.

    band: of the pair that is watched, in nats.
    """

    kind: ClassVar[str] = "step_check"
    band: ClassVar[float] = 1e-3

    def made(self, workers: FakeWorkers) -> StepCheck:
        """Makes the tested step check."""
        spec = cast(SentinelProvider, self.description("sentinel"))
        context = StepCheckContext(
            sentinel=self.sentinel(), provider=spec.name, workers=workers, saves=True
        )
        config = None if spec.config is None else msgspec.convert(dict(self.config), spec.config)
        check: StepCheck = import_attribute(spec.check or _COMPARING)(config, context)
        return check

    def sentinel(self) -> Sentinel:
        """Makes the half of the sentinel that the check asks."""
        about = SentinelContext(band=self.band, replicas=2)
        sentinel: Sentinel = make(self.description("sentinel"), self.config, about)
        return sentinel

    def test_equal_log_probs_never_end_a_run(self) -> None:
        check, sentinel = self.made(FakeWorkers()), self.sentinel()
        for step in range(5):
            metrics = run(check.updated(step, evidence_of(sentinel, compared(step))))
            assert all(name.startswith("sentinel/") for name in metrics)

    @pytest.mark.parametrize("asleep", [False, True])
    def test_a_gap_over_the_band_ends_the_run_and_names_the_replica(self, asleep: bool) -> None:
        """Also where nobody can be asked for the cause."""
        check = self.made(FakeWorkers(asleep=asleep))
        wrong = [
            *(record for record in compared(5) if record.replica == 0),
            *shifted([record for record in compared(5) if record.replica == 1], 10 * self.band),
        ]
        with pytest.raises(WeightMismatch) as raised:
            run(check.updated(5, evidence_of(self.sentinel(), wrong)))
        assert raised.value.what.startswith("rollout.1 ") and raised.value.why
        assert raised.value.facts["replicas"] == [1]
        assert raised.value.facts["versions"] == [5]

    def test_metrics_of_a_step_stay(self) -> None:
        metrics = {"loss": 0.5}
        assert run(self.made(FakeWorkers()).before_update(metrics)) == {"loss": 0.5}
        assert metrics == {"loss": 0.5}

    def test_records_that_are_scored_again_alike_end_no_run(self) -> None:
        workers = FakeWorkers()
        check = self.made(workers)

        async def step() -> dict[str, float]:
            await check.updated(1, {})
            await check.pushed(2)
            return await check.before_update({"loss": 0.5})

        metrics = run(step())
        assert metrics["loss"] == 0.5
        assert all(np.isfinite(value) for value in metrics.values())

    def test_a_generator_that_scores_otherwise_ends_the_run_before_an_update(self) -> None:
        """Where the check asks for scores; one that does not ask cannot know."""
        workers = FakeWorkers(gap=10 * self.band)
        check = self.made(workers)

        async def step() -> None:
            await check.updated(1, {})
            await check.pushed(2)
            await check.before_update({})

        try:
            run(step())
        except WeightMismatch as error:
            assert error.what.startswith("rollout.1 ")
        else:
            assert workers.scored == [], "the scores were asked for, and not judged"

    def test_a_resumed_run_checks_alike(self) -> None:
        """Its state is plain: it goes through JSON."""
        check, resumed, sentinel = (
            self.made(FakeWorkers()),
            self.made(FakeWorkers()),
            self.sentinel(),
        )
        for step in range(3):
            run(check.updated(step, evidence_of(sentinel, compared(step))))
        state = json.loads(json.dumps(check.state()))
        if state:
            resumed.restore(state)
        assert resumed.state() == check.state()
        same = evidence_of(sentinel, compared(3))
        assert run(check.updated(3, same)) == run(resumed.updated(3, same))

    def test_nothing_goes_on_after_the_end(self) -> None:
        check = self.made(FakeWorkers())

        async def left() -> int:
            await check.updated(1, {})
            await check.pushed(2)
            check.end()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return len(asyncio.all_tasks()) - 1

        assert run(left()) == 0
        check.end()  # once more does nothing

    def test_notes_are_lines_for_a_person(self) -> None:
        assert all(isinstance(note, str) and note for note in self.made(FakeWorkers()).notes())


def run(answer: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(answer)


#: Of a sentinel that brings none.
_COMPARING = "gcore_core.builtin.band:Comparing"
