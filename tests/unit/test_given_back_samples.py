"""A replica gives back what it has not ended, and another goes on with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError, RecordMismatch
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.lineage import check_seal
from gcore_core.contract.order import continued_seed, sample_seed
from gcore_core.contract.records import FINISHED, GIVEN_BACK, TRUNCATED, BegunRef, Header, Lease
from gcore_core.runtime.messages import TRAIN, GenerateRequest, Nothing
from gcore_core.runtime.rpc.service import Call
from gcore_core.runtime.shells.generator import GeneratorShell
from gcore_core.testing import fake
from tests.support.generator_shells import shell_around

SOON_S = 5.0
LEASE = Lease(0, 0, 0, (0, 1, 2, 3))


class SteppingGenerator(fake.FakeGenerator):
    """Advances its samples only as often as a test lets it; each answer has 12 letters or more."""

    steps = 0

    def __init__(self) -> None:
        settings = fake.FakeGeneratorConfig(max_new_tokens=40, late_end=1000)
        super().__init__(settings, WorkerContext(role="rollout"))
        self.seeds: list[int] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.seeds += [request.seed for request in requests]
        super().submit(requests)

    def step(self) -> list[Finished]:
        if self._running and self.steps > 0:
            self.steps -= 1
            return super().step()
        return []


class Replica:
    """One replica, in its own part of a store that both share."""

    def __init__(self, generator: SteppingGenerator, shell: GeneratorShell) -> None:
        self.generator = generator
        self.shell = shell

    def ask(self, lease: Lease) -> asyncio.Task[list[Header]]:
        return asyncio.ensure_future(self._drawn(lease))

    async def _drawn(self, lease: Lease) -> list[Header]:
        request = GenerateRequest(0, 0, 0, TRAIN, [lease], least=0)
        headers: list[Header] = []
        async with contextlib.aclosing(self.shell.generate(request, Call(lambda: None))) as stream:
            async for part in stream:
                headers += part
        return sorted(headers, key=lambda header: header.key)

    async def advance(self, steps: int) -> None:
        """Lets all samples advance by so many letters."""
        self.generator.steps = steps
        while self.generator.steps:
            await asyncio.sleep(0.001)

    async def finish(self, asked: asyncio.Task[list[Header]]) -> list[Header]:
        """Lets all samples advance to their ends."""
        self.generator.steps = 10**6
        return await asyncio.wait_for(asked, SOON_S)

    async def give_back(self) -> None:
        await asyncio.wait_for(self.shell.give_back(Nothing(), Call(lambda: None)), SOON_S)


async def replica(directory: Path) -> Replica:
    generator = SteppingGenerator()
    return Replica(generator, await shell_around(generator, directory, aborts=True))


def begun(lease: Lease, headers: Sequence[Header]) -> Lease:
    """Returns a lease to go on with what was given back."""
    refs = tuple(
        (h.sample, BegunRef(h.columns, h.slot, h.versions, h.prompt_digest, h.seal))
        for h in headers
        if h.columns is not None
    )
    return replace(lease, samples=tuple(h.sample for h in headers), begun=refs)


async def columns_of(one: Replica, header: Header) -> dict[str, np.ndarray]:
    """Returns what a reader of the store sees of a record, after the check of its seal."""
    ((columns, _),) = await one.shell._begun._store.records([header])
    check_seal(header.seal, *header.key, header.prompt_digest, columns, "a test")
    return dict(columns)


async def given_back(one: Replica, steps: int, lease: Lease = LEASE) -> list[Header]:
    """Has a replica begin a lease; returns what it gives back after some letters."""
    asked = one.ask(lease)
    await one.advance(steps)
    await one.give_back()
    return await asyncio.wait_for(asked, SOON_S)


async def test_a_replica_gives_back_what_it_has(tmp_path: Path) -> None:
    one = await replica(tmp_path)
    headers = await given_back(one, 3)
    assert [(h.key, h.status, h.n_actions) for h in headers] == [
        ((0, sample), GIVEN_BACK, 3) for sample in range(4)
    ]
    for header in headers:
        columns = await columns_of(one, header)
        assert columns["action_mask"].all() and columns["logp"].all()


async def test_both_parts_are_one_record_under_one_seal(tmp_path: Path) -> None:
    """Every action has mask 1 and the log-prob of the weights that drew it."""
    one = await replica(tmp_path)
    before = await given_back(one, 5)
    first = [await columns_of(one, header) for header in before]
    one.generator._logits = fake.initial_logits(1)  # as another replica with newer weights
    one.generator.version = 1
    asked = one.ask(begun(LEASE, before))
    for header, old in zip(await one.finish(asked), first, strict=True):
        columns = await columns_of(one, header)
        actions = columns["action_ids"]
        assert header.status in (FINISHED, TRUNCATED)
        assert header.n_actions == len(actions) > 5
        assert header.versions == (0, 1)
        assert header.seed == sample_seed(0, 0, 0, header.sample)
        np.testing.assert_array_equal(actions[:5], old["action_ids"])
        assert columns["action_mask"].all()
        tables = [fake.log_softmax(fake.initial_logits(seed)) for seed in (0, 1)]
        np.testing.assert_array_equal(columns["logp"][:5], tables[0][actions[:5]])
        np.testing.assert_array_equal(columns["logp"][5:], tables[1][actions[5:]])


async def test_both_parts_say_which_version_drew_each_action(tmp_path: Path) -> None:
    """Neither part was cut by a push, so neither has a column of versions; the record has one."""
    one = await replica(tmp_path)
    before = await given_back(one, 5)
    for header in before:
        assert "version" not in await columns_of(one, header)
    one.generator.version = 2  # as another replica with newer weights
    for header in await one.finish(one.ask(begun(LEASE, before))):
        columns = await columns_of(one, header)
        assert columns["version"].dtype == np.int32
        assert columns["version"].tolist() == [0] * 5 + [2] * (header.n_actions - 5)


async def test_parts_of_one_version_are_a_record_without_a_column_of_versions(
    tmp_path: Path,
) -> None:
    one = await replica(tmp_path)
    before = await given_back(one, 5)
    for header in await one.finish(one.ask(begun(LEASE, before))):
        assert header.versions == (0, 0)
        assert "version" not in await columns_of(one, header)


async def test_parts_that_pushes_cut_keep_all_their_versions(tmp_path: Path) -> None:
    """The first part is cut by one push, is given back, goes on, and is cut again."""
    one = await replica(tmp_path)
    asked = one.ask(LEASE)
    await one.advance(2)
    one.generator.version = 1
    await one.advance(3)
    await one.give_back()
    before = await asyncio.wait_for(asked, SOON_S)
    for header in before:
        assert (await columns_of(one, header))["version"].tolist() == [0, 0, 1, 1, 1]
    asked = one.ask(begun(LEASE, before))
    await one.advance(4)
    one.generator.version = 3
    for header in await one.finish(asked):
        columns = await columns_of(one, header)
        later = header.n_actions - 9
        assert columns["version"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1] + [3] * later
        assert header.versions == (0, 3)


async def test_what_is_sampled_behind_has_a_seed_of_its_own(tmp_path: Path) -> None:
    """An engine that counts random numbers from the request on would repeat the first ones."""
    one = await replica(tmp_path)
    before = await given_back(one, 5)
    asked = one.ask(begun(LEASE, before))
    await one.finish(asked)
    own = [sample_seed(0, 0, 0, sample) for sample in range(4)]
    assert one.generator.seeds == [*own, *(continued_seed(seed, 5) for seed in own)]


async def test_a_sample_may_be_given_back_again(tmp_path: Path) -> None:
    one = await replica(tmp_path)
    headers = await given_back(one, 2)
    for count in (5, 9):
        headers = await given_back(one, count - headers[0].n_actions, begun(LEASE, headers))
        assert [header.n_actions for header in headers] == [count] * 4
        for header in headers:
            assert (await columns_of(one, header))["logp"].all()


async def test_what_did_not_go_on_is_given_back_as_it_came(tmp_path: Path) -> None:
    """The engine had it, and had drawn nothing behind it."""
    one = await replica(tmp_path)
    before = await given_back(one, 4)
    asked = one.ask(begun(LEASE, before))
    while len(one.shell._records) < 4 or one.shell._submitting:
        await asyncio.sleep(0.001)
    await one.give_back()
    after = await asyncio.wait_for(asked, SOON_S)
    for header, old in zip(after, before, strict=True):
        assert (header.status, header.n_actions, header.seal) == (GIVEN_BACK, 4, old.seal)


async def test_samples_are_given_back_although_who_asked_for_it_goes_away(tmp_path: Path) -> None:
    """Others wait for them, such as another controller, which is asked for its own."""
    one = await replica(tmp_path)
    asked = one.ask(LEASE)
    await one.advance(3)
    aborted = asyncio.Event()
    compute = one.shell._compute

    async def takes_a_while(work: Any, *args: Any) -> Any:
        result = await compute(work, *args)
        if work == one.generator.abort:
            aborted.set()
            await asyncio.sleep(0.01)
        return result

    one.shell._compute = takes_a_while
    giving = asyncio.ensure_future(one.shell.give_back(Nothing(), Call(lambda: None)))
    await asyncio.wait_for(aborted.wait(), SOON_S)  # the engine has them no more
    giving.cancel()
    headers = await asyncio.wait_for(asked, SOON_S)
    assert [(h.status, h.n_actions) for h in headers] == [(GIVEN_BACK, 3)] * 4


async def test_content_that_is_not_what_was_sealed_is_not_gone_on_from(tmp_path: Path) -> None:
    one = await replica(tmp_path)
    headers = await given_back(one, 3)
    lease = begun(LEASE, headers)
    wrong = tuple((sample, replace(ref, seal=ref.seal ^ 1)) for sample, ref in lease.begun)
    with pytest.raises(RecordMismatch, match="going on with a sample"):
        await one.finish(one.ask(replace(lease, begun=wrong)))


async def test_a_generator_that_changes_what_was_begun_is_named(tmp_path: Path) -> None:
    one = await replica(tmp_path)
    headers = await given_back(one, 3)
    drawn = one.generator._finished

    def changed(request: SampleRequest, letters: list[int], status: str) -> Finished:
        return drawn(request, [1 - min(letters[0], 1), *letters[1:]], status)

    one.generator._finished = changed  # type: ignore[method-assign]
    asked = one.ask(begun(LEASE, headers))
    with pytest.raises(ContractError, match="its action_ids are others"):
        await one.finish(asked)
