"""Has contracts ask what draws for records, and step it until all have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_testing.contracts.base import Contract

Key = tuple[int, int]  # ordinal, sample


class Drains(Contract):
    """The base of contracts of what draws records: generators, and environments around them.

    steps_limit: number of calls of ``step`` within which a batch must end.
    """

    steps_limit: ClassVar[int] = 10_000

    def held(self, generator: Any) -> AbstractContextManager[None]:
        """Returns a context in which the engine goes on within calls of the generator alone.

        Tests of what a push or an abort finds need it: else the speed of the machine decides how
        far samples are. Override it for an engine that goes on by itself between two calls. There
        a step goes on by a few actions, and the first one lasts until a sample has an action.
        """
        return nullcontext()

    def run(self, generator: Any, requests: Sequence[SampleRequest]) -> dict[Key, Finished]:
        """Submits requests and waits for them; returns (ordinal, sample) -> record."""
        generator.submit(requests)
        return {key_of(record): record for record in self.drain(generator, requests)}

    def drain(
        self, generator: Any, requests: Iterable[SampleRequest], ended: Sequence[Finished] = ()
    ) -> list[Finished]:
        """Calls ``step`` until all requests that are not in ``ended`` have ended."""
        missing = {key_of_request(r) for r in requests} - {key_of(r) for r in ended}
        records: list[Finished] = []
        for _ in range(self.steps_limit):
            if not missing:
                break
            records += generator.step()
            missing -= {key_of(record) for record in records}
        if missing:
            pytest.fail(f"{len(missing)} samples, {sorted(missing)[0]} among them, did not end")
        return records


def key_of(record: Finished) -> Key:
    return record.request.ordinal, record.request.sample


def key_of_request(request: SampleRequest) -> Key:
    return request.ordinal, request.sample
