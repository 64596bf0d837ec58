"""Pushes between worker processes of their own, over unix sockets, one of which is killed in the
middle.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from gcore_core.contract.errors import ContractError, WorkerDied
from gcore_core.contract.factories import FactorySpec
from gcore_core.runtime.messages import BeginPush
from gcore_core.testing.push_site import PushSite, open_push_site

FAKE = "gcore_core.testing.fake:Fake"
PATIENCE_S = 60.0

BACKENDS = '''
"""A trainer whose weights are not those that generators begin with; a generator that stops in its first push."""
import os
from pathlib import Path

import numpy as np

from gcore_core.testing import fake


class Trainer(fake.FakeTrainer):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._logits = np.arange(len(fake.VOCABULARY), dtype=np.float32)


class Generator(fake.FakeGenerator):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._pipes = Path(context.directory)

    def load_weights(self, tensors):
        super().load_weights(tensors)
        if (self._pipes / "halted").exists():
            (self._pipes / "halted").write_text("in the middle")  # somebody reads it
            (self._pipes / "never").read_text()  # nobody writes it
'''  # noqa: E501


@pytest.fixture
async def site() -> AsyncIterator[PushSite]:
    async with open_push_site(BACKENDS, PushSite) as site:
        yield site


def begun(attempt: int) -> BeginPush:
    return BeginPush(1, 1, 2, attempt)  # a bucket holds one of the two tensors


async def test_a_generator_killed_in_a_push_leaves_the_trainer_able_to_push(site: PushSite) -> None:
    """The survivor is freed by the next attempt; the killed one's replacement and it hold the
    trainer's bytes.
    """
    async with asyncio.timeout(PATIENCE_S):
        halted = asyncio.Event()
        for pipe in ("halted", "never"):
            os.mkfifo(site.directory / pipe)
        told = os.open(site.directory / "halted", os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(told, halted.set)
        _, _, dying = await asyncio.gather(
            site.start("policy.0", FactorySpec("backends:Trainer", f"{FAKE}TrainerConfig")),
            site.start("rollout.0", FactorySpec(f"{FAKE}Generator", f"{FAKE}GeneratorConfig")),
            site.start("rollout.1", FactorySpec("backends:Generator", f"{FAKE}GeneratorConfig")),
        )
        assert await site.train() == 1
        await site.begin_push(begun(attempt=0))
        surviving, killed = site.pull(0, 1), site.pull(1, 1)
        await halted.wait()
        asyncio.get_running_loop().remove_reader(told)
        os.close(told)
        (site.directory / "halted").unlink()
        os.kill(dying, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await killed
        assert not surviving.done()
        await site.start("rollout.1", FactorySpec("backends:Generator", f"{FAKE}GeneratorConfig"))
        await site.begin_push(begun(attempt=1))
        with pytest.raises(ContractError, match="another push began before this one ended"):
            await surviving
        confirmed = await asyncio.gather(*(site.pull(number, 1, attempt=1) for number in range(2)))
    assert [(push.version, push.nbytes, push.verified) for push in confirmed] == [(1, 36, True)] * 2
