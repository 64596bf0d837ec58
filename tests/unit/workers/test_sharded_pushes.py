"""Ranks that meet in collectives do the same in the same order, whoever of the others is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gcore_testing import fake

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.trainer import TrainRecord
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.publishing import Publishing
from gcore_core.runtime.compute import ThreadCompute
from gcore_core.runtime.messages import (
    CATCH_UP,
    PUSH_BEGIN,
    PUSH_BUCKET,
    PUSH_PULL,
    BeginPush,
    BucketRequest,
    CatchUp,
    PrepareRequest,
    PullWeights,
    PushConfirmed,
    TrainRequest,
)
from gcore_core.runtime.relay import Relay
from gcore_core.wire.in_process import InlineNetwork, Weather
from gcore_core.wire.service import Call, Service
from gcore_core.workers.push import exhaust
from gcore_core.workers.trainer import TrainerShell
from gcore_core.workers.weights_follower import WeightsFollower

RANKS = 2
#: A rank waits so long for another one that never comes.
LATE_S = 20.0


class Meeting:
    """Lets the ranks meet; each says for what, which must be the same."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._purposes = [""] * RANKS

    def meet(self, rank: int, purpose: str) -> None:
        self._purposes[rank] = purpose
        self._barrier.wait(LATE_S)
        assert len(set(self._purposes)) == 1, f"the ranks meet for {self._purposes}"
        self._barrier.wait(LATE_S)


class Sharded(fake.FakeTrainer):
    """Holds a part of the weights: whatever needs all of them needs the other rank."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(fake.FakeTrainerConfig(), WorkerContext(role="policy", rank=rank))
        self._rank = rank
        self._meeting = meeting

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        for spec, content in super().export_weights():
            self._meeting.meet(self._rank, f"tensor {spec.name}")
            yield spec, content

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        self._meeting.meet(self._rank, "prepare")
        return super().prepare(records, scalars)

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        self._meeting.meet(self._rank, "train")
        return super().train(step, advantages, minibatches, epochs)


class NoRecords:
    node = "agent.0"

    async def records(self, items: Sequence[Any]) -> list[Any]:
        return []


class Slow:
    """Weather in which rank 1 hears late of a push."""

    async def travel(self, source: str, target: str, method: str) -> int:
        if (method, target) == ("push.begin", "policy.1"):
            await asyncio.sleep(0.05)
        return 1


class Site:
    """A trainer of several ranks, a lead, and generators that were started after its last push.

    publishing: the lead's.
    """

    def __init__(self, directory: Path, weather: Weather | None = None) -> None:
        self.network = InlineNetwork(weather)
        meeting = Meeting()
        self.trainers = [Sharded(rank, meeting) for rank in range(RANKS)]
        self.shells: list[TrainerShell] = []
        for rank, trainer in enumerate(self.trainers):
            name = f"policy.{rank}"
            view = self.network.view(name)
            others = range(1, RANKS) if rank == 0 else ()
            shell = TrainerShell(
                trainer,
                NoRecords(),  # type: ignore[arg-type]
                ThreadCompute(),
                directory / name,
                rank,
                followers=[view.peer(f"policy.{other}") for other in others],
            )
            service = Service(name)
            shell.register(service, Relay(view, service, shards=1))
            self.network.services[name] = service
            self.shells.append(shell)
        lead = self.network.view("controller.0")
        service = Service("controller.0")
        self.network.services["controller.0"] = service
        context = SimpleNamespace(
            trainers=[lead.peer(f"policy.{rank}") for rank in range(RANKS)],
            replicas=[lead.peer(f"rollout.{number}") for number in range(4)],
            service=service,
            trainers_turn=asyncio.Semaphore(1),
            facts=SimpleNamespace(trainers_sleep=False),
        )
        config = SyncConfig(push_bucket_bytes=1)  # one tensor a bucket
        self.publishing = Publishing(context, config, SimpleNamespace())  # type: ignore[arg-type]
        self.publishing.version = 0

    async def new_generator(self, number: int) -> fake.FakeGenerator:
        """Has a new process told to the lead; returns its backend, which had no weights before."""
        backend = fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
        backend.version = -1
        name = f"rollout.{number}"
        view = self.network.view(name)
        follower = WeightsFollower(backend, ThreadCompute(), view, asyncio.Lock(), True)

        async def pull(request: PullWeights, call: Call) -> PushConfirmed:
            return await follower.pull(request, call.progress)

        service = Service(name)
        service.add(PUSH_PULL, pull)
        self.network.services[name] = service
        shard = self.network.view("controller.1").peer("controller.0")
        await asyncio.wait_for(shard.call(CATCH_UP, CatchUp(name, 0)), LATE_S)
        return backend

    async def lose_a_generator(self, *, after_buckets: int, attempt: int = 90) -> None:
        """The lead begins a push; a generator takes some buckets and is never heard of again."""
        policy = self.network.view("controller.0").peer("policy.0")
        # one tensor a bucket
        await policy.call(PUSH_BEGIN, BeginPush(self.trainers[0].version, 1, 1, attempt))
        for index in range(after_buckets):
            request = BucketRequest(self.trainers[0].version, 0, index, attempt)
            await policy.call(PUSH_BUCKET, request)

    async def take_step(self, step: int) -> None:
        """Prepares and trains on no records, as a controller asks all ranks for."""
        call = Call(lambda: None)
        await asyncio.gather(
            *(s.prepare([PrepareRequest(step, [], [])], call) for s in self.shells)
        )
        await asyncio.gather(*(s.train([TrainRequest(step, [], 1, 1)], call) for s in self.shells))


async def test_a_generator_that_was_started_again_gets_the_weights_of_several_ranks(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    assert (await site.new_generator(1)).version == 0
    await site.take_step(0)


async def test_a_new_generator_gets_the_weights_that_the_trainer_holds_however_far_it_has_gone_on(
    tmp_path: Path,
) -> None:
    """Where generation runs ahead, samples that weights of long ago began are asked of it."""
    site = Site(tmp_path)
    for step in range(3):
        await asyncio.wait_for(site.take_step(step), LATE_S)
    site.publishing.version = 3
    assert (await site.new_generator(1)).version == 3


@pytest.mark.parametrize("after_buckets", [0, 1, 2])
async def test_the_next_generator_gets_weights_when_one_is_lost_in_its_push(
    after_buckets: int, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    for number in range(1, 4):
        await site.lose_a_generator(after_buckets=after_buckets, attempt=90 + number)
        assert (await site.new_generator(number)).version == 0
    await site.take_step(0)


@pytest.mark.parametrize("weather", [None, Slow()])
@pytest.mark.parametrize("after_buckets", [0, 1, 2])
async def test_a_step_is_trained_on_when_a_generator_is_lost_in_its_push(
    after_buckets: int, weather: Weather | None, tmp_path: Path
) -> None:
    """Other generators have drawn its records meanwhile, so nobody begins another push. All ranks
    export before they prepare, also one that hears late of the push.
    """
    site = Site(tmp_path, weather)
    await site.lose_a_generator(after_buckets=after_buckets)
    await asyncio.wait_for(site.take_step(0), LATE_S)
    assert [trainer.version for trainer in site.trainers] == [1, 1]


async def test_the_receivers_get_the_error_of_a_rank_that_cannot_export(tmp_path: Path) -> None:
    site = Site(tmp_path)
    asked = threading.Event()

    def broken() -> Iterator[Any]:
        asked.wait(LATE_S)
        raise ContractError("this rank has lost its device", where="policy.1")

    site.trainers[1].export_weights = broken  # type: ignore[method-assign]
    policy = site.network.view("rollout.9").peer("policy.0")
    await policy.call(PUSH_BEGIN, BeginPush(0, 1, 1))
    waiting = asyncio.ensure_future(policy.call(PUSH_BUCKET, BucketRequest(0, 0, 0)))
    await asyncio.sleep(0.05)
    asked.set()
    with pytest.raises(ContractError, match="this rank has lost its device"):
        await waiting
    # Rank 0 waits for it in a collective; here it gets out of that.
    del site.trainers[1].export_weights
    await asyncio.to_thread(exhaust, site.trainers[1].export_weights())


@pytest.mark.parametrize("late", ["begin_push", "exported"])
async def test_a_message_of_an_earlier_push_that_comes_late_changes_nothing(
    late: str, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    assert (await site.new_generator(1)).version == 0
    call = Call(lambda: None)
    await getattr(site.shells[1], late)(BeginPush(0, 1, 1), call)
    await asyncio.wait_for(site.take_step(0), LATE_S)
