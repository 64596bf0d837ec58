"""A generator that is behind gets its weights from the lead; others draw what came to it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.errors import WeightMismatch, WeightsBehind, WorkerDied
from gcore_core.contract.job_settings import RunSettings
from gcore_core.contract.records import Header
from gcore_core.controllers import publishing as publishing_module
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.generation.dispatch import Lanes, Round
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.placement.lead import Awake
from gcore_core.controllers.publishing import Publishing
from gcore_core.runtime.messages import (
    CATCH_UP,
    PUSH_BEGIN,
    PUSH_PULL,
    TRAIN,
    CatchUp,
    GenerateRequest,
    PushConfirmed,
)
from gcore_core.wire.retry import RetryPolicy
from gcore_core.wire.service import Call, Service


class Workers:
    """The policy and the generators, as the lead asks them.

    pushed: name of a generator for each push that it took, in order.
    begun: how many pushes were begun.
    error: what a pull raises.
    """

    def __init__(self) -> None:
        self.pushed: list[str] = []
        self.begun = 0
        self.error: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()

    def peer(self, name: str) -> Any:
        async def call(endpoint: Any, request: Any, *, deadline_s: float | None = None) -> Any:
            if endpoint == PUSH_BEGIN:
                self.begun += 1
            elif endpoint == PUSH_PULL:
                await self.may_load.wait()
                if self.error is not None:
                    raise self.error
                self.pushed.append(name)
                return PushConfirmed(request.version, 0, True)
            return None

        return SimpleNamespace(name=name, call=call)


def lead_of(workers: Workers) -> tuple[Publishing, Any]:
    """Makes the lead's part of a run whose program has the trainers."""
    replicas = [workers.peer(f"rollout.{number}") for number in range(2)]
    context = SimpleNamespace(
        trainers=[workers.peer("policy.0")],
        replicas=replicas,
        supervisor=workers.peer("supervisor"),
        annotators={},
        service=Service("controller.0"),
        trainers_turn=asyncio.Semaphore(0),
        facts=SimpleNamespace(run=RunSettings(), trained={}, shards=1, trainers_sleep=False),
    )
    context.trainers_free = lambda: ControllerContext.trainers_free(context)  # type: ignore[arg-type]
    placement: Any = SimpleNamespace(replicas=replicas)
    publishing = Publishing(context, SyncConfig(), placement)  # type: ignore[arg-type]
    publishing.version = 3
    return publishing, context


def catching_up(publishing: Publishing, name: str) -> asyncio.Task[Any]:
    return asyncio.ensure_future(publishing.catch_up(CatchUp(name, 3), Call(lambda: None)))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_push_to_one_that_is_behind_waits_until_the_trainers_are_free() -> None:
    workers = Workers()
    publishing, context = lead_of(workers)
    asked = [catching_up(publishing, "rollout.1") for _ in range(3)]  # by several shards
    await turns()
    assert not workers.begun
    async with context.trainers_free():
        await asyncio.gather(*asked)
    assert (workers.pushed, workers.begun) == (["rollout.1"], 1)
    assert context.trainers_turn.locked()


async def test_one_that_had_the_next_push_to_all_gets_none_of_its_own() -> None:
    workers = Workers()
    publishing, context = lead_of(workers)
    asked = catching_up(publishing, "rollout.1")
    await turns()
    await publishing._push_until_whole(4, 0)
    async with context.trainers_free():
        await asked
    assert (workers.pushed, workers.begun) == (["rollout.0", "rollout.1"], 1)


async def test_the_trainers_are_given_back_when_the_push_is_over_whoever_asked_for_it() -> None:
    workers = Workers()
    workers.may_load.clear()
    publishing, context = lead_of(workers)
    async with context.trainers_free():
        asked = catching_up(publishing, "rollout.1")
        await turns()
        asked.cancel()
        await turns()
        asyncio.get_running_loop().call_later(0.05, workers.may_load.set)
    assert workers.pushed == ["rollout.1"]


async def test_one_that_is_lost_in_its_push_is_not_waited_for() -> None:
    workers = Workers()
    workers.error = WorkerDied("rollout.1 was killed")
    publishing, context = lead_of(workers)
    async with context.trainers_free():
        await catching_up(publishing, "rollout.1")
        workers.error = None
        await catching_up(publishing, "rollout.1")
    assert (workers.pushed, workers.begun) == (["rollout.1"], 2)


async def test_who_asks_during_the_push_has_had_it_when_it_ends() -> None:
    """A second one would come when the generator samples for the shard that asked first."""
    workers = Workers()
    workers.may_load.clear()
    publishing, context = lead_of(workers)
    async with context.trainers_free():
        first = catching_up(publishing, "rollout.1")
        await turns()
        second = catching_up(publishing, "rollout.1")
        await turns()
        workers.may_load.set()
        await asyncio.gather(first, second)
    assert (workers.pushed, workers.begun) == (["rollout.1"], 1)


async def test_nothing_is_pushed_for_who_went_away_before_the_trainers_were_free() -> None:
    workers = Workers()
    publishing, context = lead_of(workers)
    asked = catching_up(publishing, "rollout.1")
    await turns()
    asked.cancel()
    await turns()
    await publishing.before_update(4)
    assert not workers.begun
    assert context.trainers_turn.locked()


async def test_wrong_weights_are_pushed_again_then_told_to_who_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing_module, "PUSHES", RetryPolicy(tries=3, first_pause_s=0.0))
    workers = Workers()
    workers.error = WeightMismatch("other bytes")
    publishing, context = lead_of(workers)
    async with context.trainers_free():
        with pytest.raises(WeightMismatch, match="rollout.1: other bytes"):
            await catching_up(publishing, "rollout.1")
    assert workers.begun == 3
    assert context.trainers_turn.locked()


class Replica:
    """A generator that draws at once, or says that it is behind."""

    def __init__(self, name: str, behind: bool) -> None:
        self.name = name
        self.behind = behind
        self.drawn: list[int] = []

    async def stream(
        self, endpoint: Any, request: GenerateRequest
    ) -> AsyncGenerator[list[Header], None]:
        if self.behind and request.leases:
            raise WeightsBehind("samples need other weights")
        for lease in request.leases:
            await asyncio.sleep(0)
            self.drawn.append(lease.ordinal)
            yield [Header(lease.ordinal, 0, lease.row, 0)]


class Lead:
    """Pushes to a replica when it may, and notes who was behind."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = {replica.name: replica for replica in replicas}
        self.may_push = asyncio.Event()
        self.told: list[str] = []

    async def call(self, endpoint: Any, request: CatchUp, *, deadline_s: float | None) -> None:
        assert endpoint == CATCH_UP
        self.told.append(request.replica)
        await self.may_push.wait()
        self.replicas[request.replica].behind = False


def work_of(replicas: list[Replica], lead: Lead) -> tuple[asyncio.Task[None], Ledger]:
    """Has one part for each replica drawn, from a queue that they share."""
    ledger = Ledger(shard=0, shards=1, rows=16, seed=0, samples=1)
    context = SimpleNamespace(
        facts=SimpleNamespace(shard=0, run=RunSettings()),
        trace=SimpleNamespace(finished=lambda *_: None),
        lead=lead,
    )
    scoring = SimpleNamespace(add=lambda headers: None)
    placement = SimpleNamespace(awake=Awake(version=0, replicas={}, in_turns=False))
    round_ = Round(version=0, number=0, purpose=TRAIN)
    peers: Any = replicas
    lanes = Lanes(context, ledger, round_, scoring, placement, peers)  # type: ignore[arg-type]
    queue = deque([[lease] for lease in ledger.lease(range(len(replicas)))])
    work = lanes.work_off([(number, queue) for number in range(len(replicas))])
    return asyncio.ensure_future(work), ledger


async def test_others_draw_what_came_to_one_that_is_behind() -> None:
    replicas = [Replica("rollout.0", behind=True), Replica("rollout.1", behind=False)]
    lead = Lead(replicas)
    working, ledger = work_of(replicas, lead)
    await turns()
    assert lead.told == ["rollout.0"]
    assert sorted(replicas[1].drawn) == [0, 1], "while the lead cannot push"
    lead.may_push.set()
    await working
    assert replicas[0].drawn == []
    assert ledger.drawn


async def test_what_came_to_a_single_one_that_is_behind_is_sent_again() -> None:
    replicas = [Replica("rollout.0", behind=True)]
    lead = Lead(replicas)
    working, ledger = work_of(replicas, lead)
    await turns()
    assert not working.done()
    lead.may_push.set()
    await working
    assert replicas[0].drawn == [0]
    assert ledger.drawn
