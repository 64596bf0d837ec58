"""A request that does not come to its end leaves no sample that counts as running undrawn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gcore_testing import fake

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import Lease, Prompt
from gcore_core.runtime.messages import TRAIN, GenerateRequest
from gcore_core.wire.service import Call
from gcore_core.workers.generator import GeneratorShell
from tests.support.generator_shells import shell_around

LIMIT_S = 5
TWO_LEASES = [Lease(0, 0, 0, (0, 1)), Lease(1, 1, 0, (0, 1))]


async def shell_of(directory: Path) -> GeneratorShell:
    generator = fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
    return await shell_around(generator, directory, follows=True)


async def drawn(shell: GeneratorShell) -> list[tuple[int, int]]:
    request = GenerateRequest(0, 0, 0, TRAIN, TWO_LEASES, least=0)
    async with asyncio.timeout(LIMIT_S):
        parts = [part async for part in shell.generate(request, Call(lambda: None))]
    return sorted(header.key for part in parts for header in part)


ALL = [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_a_lease_that_cannot_be_opened_leaves_none_before_it_running(tmp_path: Path) -> None:
    """Such as one of a row that a file system does not give; it is asked again."""
    shell = await shell_of(tmp_path)
    rows = shell._datasets["train"]
    n_lost = 1

    class LostOnce:
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, row: int) -> Prompt:
            nonlocal n_lost
            if row == 1 and n_lost:
                n_lost -= 1
                raise OSError("the file is not there")
            return rows[row]

    shell._datasets = {"train": LostOnce()}
    with pytest.raises(OSError, match="the file is not there"):
        await drawn(shell)
    assert shell.owed() == 0
    assert await drawn(shell) == ALL


async def test_a_request_that_is_cancelled_while_the_engine_steps_is_drawn(tmp_path: Path) -> None:
    """As when the connection to its controller ends. Another shard may wait for the same round."""
    shell = await shell_of(tmp_path)
    async with shell._engine.lock:  # as a step of the engine holds it
        asked = asyncio.ensure_future(drawn(shell))
        while not shell._background and not asked.done():
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])
        submitting = {*shell._background}
    await asyncio.wait(submitting)
    assert shell._records.has_all(ALL, 0), "nobody has asked again, and the other shard waits"
    assert await drawn(shell) == ALL
