"""The oldest weights that may begin a sample are told apart from the step that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_testing import fake

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WeightsBehind, WeightsGone
from gcore_core.contract.records import Header, Lease
from gcore_core.runtime.messages import (
    GREEDY,
    TRAIN,
    GenerateRequest,
    Nothing,
    PullWeights,
    SleepRequest,
)
from gcore_core.wire.service import Call
from gcore_core.workers.generator import GeneratorShell
from tests.support.generator_shells import shell_around

HELD = 4  # version of the weights that the generator holds


async def shell_of(directory: Path) -> GeneratorShell:
    generator = fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
    generator.version = HELD
    return await shell_around(generator, directory, follows=True)


async def drawn_with(shell: GeneratorShell, least: int) -> list[tuple[int, int]]:
    """The versions of two samples."""
    leases = [Lease(0, 0, 0, (0, 1))]
    request = GenerateRequest(HELD + 1, 0, 0, TRAIN, leases, least=least)
    headers: list[Header] = []
    async for part in shell.generate(request, Call(lambda: None)):
        headers += part
    return [header.versions for header in headers]


@pytest.mark.parametrize("least", [HELD - 1, HELD])
async def test_a_step_ahead_of_the_weights_is_drawn_with_those_that_there_are(
    least: int, tmp_path: Path
) -> None:
    assert await drawn_with(await shell_of(tmp_path), least) == [(HELD, HELD)] * 2


async def test_a_generator_below_the_least_version_draws_nothing_before_a_push(
    tmp_path: Path,
) -> None:
    """As one that slept through a push, or was started again."""
    shell = await shell_of(tmp_path)
    await shell.sleep(SleepRequest(), Call(lambda: None))
    await shell.wake(Nothing(), Call(lambda: None))
    with pytest.raises(WeightsBehind, match=f"version {HELD + 1}, .* holds {HELD}"):
        await drawn_with(shell, HELD + 1)
    shell._backend.version = HELD + 1  # type: ignore[misc]
    assert await drawn_with(shell, HELD + 1) == [(HELD + 1, HELD + 1)] * 2


@pytest.mark.parametrize("newer", [0, 1])
async def test_a_generator_that_has_caught_up_is_left_alone_by_another_push_to_catch_up(
    newer: int, tmp_path: Path
) -> None:
    """It may be sampling with what it was asked to have, and the trainers may be one version ahead;
    nobody is asked for a plan.
    """
    shell = await shell_of(tmp_path)
    late = PullWeights(HELD + newer, 0, "nobody", attempt=7, needed=HELD)
    confirmed = await shell.pull(late, Call(lambda: None))
    assert (confirmed.version, confirmed.nbytes) == (HELD + newer, 0)
    assert shell._backend.version == HELD


async def test_a_run_that_repeats_draws_no_sample_under_newer_weights(tmp_path: Path) -> None:
    """What was drawn under the right ones is still given to who asks again."""
    shell = await shell_of(tmp_path)

    async def drawn(sample: int, least: int) -> tuple[int, int]:
        leases = [Lease(0, 0, 0, (sample,))]
        request = GenerateRequest(HELD, 0, 0, TRAIN, leases, least=least, exact=True)
        parts = [part async for part in shell.generate(request, Call(lambda: None))]
        return parts[0][0].versions

    assert await drawn(0, HELD) == (HELD, HELD)
    shell._backend.version = HELD + 1  # type: ignore[misc]
    assert await drawn(0, HELD) == (HELD, HELD)
    with pytest.raises(WeightsGone, match=rf"weights of version {HELD}, and this generator holds"):
        await drawn(1, HELD)
    assert await drawn(1, HELD + 1) == (HELD + 1, HELD + 1)


@pytest.mark.parametrize(("purpose", "ordinal"), [(TRAIN, 0), (GREEDY, -1)])
async def test_a_record_requested_by_a_later_step_is_sampled_again(
    purpose: str, ordinal: int, tmp_path: Path
) -> None:
    """Also while the earlier step's records are still held, because others of them are carried: an
    evaluation asks for the same ordinals again at each version.
    """
    shell = await shell_of(tmp_path)

    async def version_drawn(step: int) -> tuple[int, int]:
        request = GenerateRequest(step, 0, 0, purpose, [Lease(ordinal, 0, 0, (0,))], least=HELD)
        parts = [part async for part in shell.generate(request, Call(lambda: None))]
        return parts[0][0].versions

    assert await version_drawn(HELD) == (HELD, HELD)
    shell._backend.version = HELD + 1  # type: ignore[misc]
    assert await version_drawn(HELD) == (HELD, HELD), "asked again for the same step"
    assert await version_drawn(HELD + 1) == (HELD + 1, HELD + 1)
