"""Ranks that meet in collectives do the same in the same order, whoever of the others is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError, WeightsGone
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.trainer import TrainRecord
from gcore_core.runtime.messages import (
    PUSH_BEGIN,
    PUSH_BUCKET,
    BeginPush,
    BucketRequest,
    FollowPush,
    PrepareRequest,
    TrainRequest,
)
from gcore_core.runtime.process.compute import ThreadCompute
from gcore_core.runtime.push import exhaust
from gcore_core.runtime.relay import Relay
from gcore_core.runtime.rpc.in_process import InlineNetwork
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.shells.trainer import TrainerShell
from gcore_core.runtime.shells.weights_follower import WeightsFollower
from gcore_core.testing import fake

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


class Site:
    """A trainer of several ranks, and generators that were started after its last push."""

    def __init__(self, directory: Path) -> None:
        self.network = InlineNetwork()
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

    def generator(self, number: int) -> tuple[fake.FakeGenerator, WeightsFollower]:
        """Returns the generator of a new process, which has the weights of no version."""
        backend = fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
        backend.version = -1
        follower = WeightsFollower(
            backend,
            ThreadCompute(),
            self.network.view(f"rollout.{number}"),
            asyncio.Lock(),
            [f"policy.{rank}" for rank in range(RANKS)],
            number,
        )
        return backend, follower

    async def lose_a_generator(self, *, after_buckets: int, attempt: int = 9) -> None:
        """A generator begins a push, takes some buckets and is never heard of again."""
        policy = self.network.view("rollout.9").peer("policy.0")
        # one tensor a bucket
        begun = BeginPush(self.trainers[0].version, 1, 1, attempt, waits=True)
        await policy.call(PUSH_BEGIN, begun)
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


async def test_a_generator_that_was_started_anew_gets_the_weights_of_several_ranks(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    backend, follower = site.generator(1)
    await asyncio.wait_for(follower.restore(0, lambda: None), LATE_S)
    assert backend.version == 0
    await site.take_step(0)


async def test_after_an_update_a_new_generator_gets_newer_weights_unless_the_run_is_to_repeat(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    await asyncio.wait_for(site.take_step(0), LATE_S)
    backend, follower = site.generator(1)
    await asyncio.wait_for(follower.restore(0, lambda: None), LATE_S)
    assert backend.version == 1
    backend, follower = site.generator(2)
    with pytest.raises(WeightsGone, match=r"need the weights of version 0, and the trainer holds"):
        await asyncio.wait_for(follower.restore(0, lambda: None, exact=True), LATE_S)
    assert backend.version == -1
    await asyncio.wait_for(follower.restore(1, lambda: None, exact=True), LATE_S)
    assert backend.version == 1


async def test_a_new_generator_gets_the_weights_that_the_trainer_holds_however_far_it_has_gone_on(
    tmp_path: Path,
) -> None:
    """Where generation runs ahead, samples that weights of long ago began are asked of it."""
    site = Site(tmp_path)
    for step in range(3):
        await asyncio.wait_for(site.take_step(step), LATE_S)
    backend, follower = site.generator(1)
    await asyncio.wait_for(follower.restore(0, lambda: None), LATE_S)
    assert backend.version == 3


@pytest.mark.parametrize("after_buckets", [0, 1, 2])
async def test_the_next_generator_gets_weights_when_one_is_lost_in_its_push(
    after_buckets: int, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    for number in range(1, 4):
        await site.lose_a_generator(after_buckets=after_buckets, attempt=number)
        backend, follower = site.generator(number)
        await asyncio.wait_for(follower.restore(0, lambda: None), LATE_S)
        assert backend.version == 0
    await site.take_step(0)


@pytest.mark.parametrize("after_buckets", [0, 1, 2])
async def test_a_step_is_trained_on_when_a_generator_is_lost_in_its_push(
    after_buckets: int, tmp_path: Path
) -> None:
    """Other generators have drawn its records meanwhile, so nobody begins another push."""
    site = Site(tmp_path)
    await site.lose_a_generator(after_buckets=after_buckets)
    await asyncio.wait_for(site.take_step(0), LATE_S)
    assert [trainer.version for trainer in site.trainers] == [1, 1]


async def test_a_push_waits_with_no_turn_for_a_rank_that_trains(tmp_path: Path) -> None:
    """Rank 1 got the step's request first: it trains, and waits there for rank 0."""
    site = Site(tmp_path)
    call = Call(lambda: None)
    await asyncio.gather(*(s.prepare([PrepareRequest(0, [], [])], call) for s in site.shells))
    training = asyncio.ensure_future(site.shells[1].train([TrainRequest(0, [], 1, 1)], call))
    await asyncio.sleep(0)
    push = asyncio.ensure_future(site.shells[0].begin_push(BeginPush(0, 1, 1, attempt=9), call))
    await asyncio.sleep(0)
    await asyncio.wait_for(site.shells[0].train([TrainRequest(0, [], 1, 1)], call), LATE_S)
    await training
    with pytest.raises(ContractError, match="asked to push version 0, the trainer holds 1"):
        await push


async def test_the_receivers_get_the_error_of_a_rank_that_cannot_export(tmp_path: Path) -> None:
    site = Site(tmp_path)

    def broken() -> Iterator[Any]:
        raise ContractError("this rank has lost its device", where="policy.1")

    site.trainers[1].export_weights = broken  # type: ignore[method-assign]
    policy = site.network.view("rollout.9").peer("policy.0")
    await policy.call(PUSH_BEGIN, BeginPush(0, 1, 1))
    waiting = asyncio.ensure_future(policy.call(PUSH_BUCKET, BucketRequest(0, 0, 0)))
    with pytest.raises(ContractError, match="this rank has lost its device"):
        await waiting
    # Rank 0 waits for it in a collective; here it gets out of that.
    del site.trainers[1].export_weights
    await asyncio.to_thread(exhaust, site.trainers[1].export_weights())


async def test_a_push_that_is_followed_keeps_its_turn_when_it_is_freed_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the rank that gave it up is slower to say so than this one is to begin."""
    site = Site(tmp_path)
    shell = site.shells[1]
    began, may_end = asyncio.Event(), asyncio.Event()

    async def compute(work: Any, *args: Any) -> None:
        began.set()
        await may_end.wait()

    monkeypatch.setattr(shell, "_compute", compute)
    call = Call(lambda: None)
    assert (await shell.reserve(FollowPush(0, 1), call)).waits
    following = asyncio.ensure_future(shell.follow(FollowPush(0, 1), call))
    await began.wait()
    await shell.free(FollowPush(0, 1), call)
    assert not (await shell.reserve(FollowPush(0, 2), call)).waits, "its turn is taken"
    may_end.set()
    await following
    assert (await shell.reserve(FollowPush(0, 3), call)).waits


@pytest.mark.parametrize("late", ["reserve", "free", "follow"])
async def test_a_message_of_an_earlier_push_that_comes_late_changes_nothing(
    late: str, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    backend, follower = site.generator(1)
    await asyncio.wait_for(follower.restore(0, lambda: None), LATE_S)
    assert backend.version == 0
    call = Call(lambda: None)
    await getattr(site.shells[1], late)(FollowPush(0, 1), call)
    await asyncio.wait_for(site.take_step(0), LATE_S)
