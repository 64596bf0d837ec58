"""A controller's event loop rests while records come, and never when that would cost a rollout."""

from __future__ import annotations

import asyncio
import socket
from types import NoneType, SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.deadlines import Deadlines, Wait
from gcore_core.contract.launching import Endpoint
from gcore_core.contract.records import Header, RecordScore
from gcore_core.controllers.lost_nodes import LostNodes
from gcore_core.controllers.window import scoring
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.controllers.window.scoring import WAIT_S, Scoring
from gcore_core.runtime.messages import TRAIN, ScoreRequest
from gcore_core.runtime.rpc import resting
from gcore_core.runtime.rpc.resting import (
    LONGEST_REST_S,
    REST_SHARE,
    URGENT_REST_S,
    Pace,
    RestingLoop,
)
from gcore_core.runtime.rpc.service import PROGRESS_S, PROGRESS_SHARE, Call, Service
from gcore_core.testing.simulation import run_virtual


@pytest.mark.parametrize("drawn_for_s", [0.0, 0.01, 1.0, 100.0, 10_000.0])
def test_a_rest_is_a_small_share_of_the_draw_and_bounded(drawn_for_s: float) -> None:
    rest_s = Pace(1000).rest_s(drawn_for_s)
    assert rest_s == min(REST_SHARE * drawn_for_s, LONGEST_REST_S)


def test_a_draw_rests_less_the_fewer_records_are_left_and_not_for_the_last_one() -> None:
    pace = Pace(1000)
    rests_s = []
    for left in (50, 25, 10, 0):
        pace.left = left
        rests_s.append(pace.rest_s(1000.0))
    assert rests_s == sorted(rests_s, reverse=True)
    assert rests_s[0] == LONGEST_REST_S
    assert rests_s[-1] == 0.0


def test_a_loop_rests_only_while_records_are_drawn() -> None:
    async def main(loop: RestingLoop) -> None:
        assert loop.rest_s() == 0.0
        pace = Pace(10)
        with loop.draw(pace):
            pace.began_s -= 1000.0
            assert loop.rest_s() == LONGEST_REST_S
            with loop.urgent():
                assert loop.rest_s() == URGENT_REST_S
            assert loop.rest_s() == LONGEST_REST_S
            with loop.draw(Pace(10)):
                assert loop.rest_s() == LONGEST_REST_S, "the draw that began first decides"
        assert loop.rest_s() == 0.0

    loop = RestingLoop()
    try:
        loop.run_until_complete(main(loop))
    finally:
        loop.close()


def test_what_comes_during_a_rest_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty sockets become readable one after the other in a rest; one wake-up reads them all."""
    loop = RestingLoop()
    pairs = [socket.socketpair() for _ in range(40)]
    rests_s: list[float] = []

    def rest(seconds: float) -> None:
        rests_s.append(seconds)
        for writer, _ in pairs:
            writer.send(b"record")

    monkeypatch.setattr("gcore_core.runtime.rpc.resting.time.sleep", rest)
    wakes: list[int] = []

    async def main() -> None:
        pace = Pace(1000)
        n_read = 0
        everything = loop.create_future()

        def read(reader: socket.socket) -> None:
            nonlocal n_read
            reader.recv(100)
            n_read += 1
            wakes.append(len(rests_s))
            if n_read == len(pairs):
                everything.set_result(None)

        for _, reader in pairs:
            loop.add_reader(reader, read, reader)
        with resting.resting(pace):
            pace.began_s -= 1000.0
            await everything

    try:
        loop.run_until_complete(main())
    finally:
        for pair in pairs:
            for end in pair:
                end.close()
        loop.close()
    assert rests_s == [LONGEST_REST_S]
    assert wakes == [1] * 40


def test_a_rest_ends_with_the_timer_that_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = RestingLoop()
    rests_s: list[float] = []
    monkeypatch.setattr("gcore_core.runtime.rpc.resting.time.sleep", rests_s.append)

    async def main() -> None:
        pace = Pace(1000)
        with resting.resting(pace):
            pace.began_s -= 1000.0
            await asyncio.sleep(0.01)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert max(rests_s) <= 0.01


async def test_another_event_loop_goes_on_as_ever() -> None:
    with resting.resting(Pace(1)), resting.urgent():
        assert resting.present_rest_s() == 0.0


@pytest.mark.parametrize(("rest_s", "waits_s"), [(0.0, WAIT_S), (0.1, 0.0)])
def test_what_came_in_a_rest_is_scored_in_one_request_without_a_further_wait(
    rest_s: float, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "present_rest_s", lambda: rest_s)
    scored: list[list[Header]] = []

    class Scorer:
        name = "scorer"

        async def call(self, endpoint: Any, request: ScoreRequest, **_: Any) -> list[RecordScore]:
            scored.append(request.headers)
            return []

    context = SimpleNamespace(
        facts=SimpleNamespace(rewards=["r"], of_groups=[]),
        scorers=[(Scorer(), ["r"])],
        trace=SimpleNamespace(scored=lambda scores: None),
        lost=LostNodes(),
    )
    awake = SimpleNamespace(in_turns=False, version=0, judges=dict)
    ledger = Ledger(shard=0, shards=1, rows=8, seed=0, samples=1)
    headers = [Header(ordinal, 0, 0, 0) for ordinal in range(5)]

    async def main() -> float:
        began_s = asyncio.get_running_loop().time()
        work = Scoring(context, ledger, TRAIN, SimpleNamespace(awake=awake))  # type: ignore[arg-type]

        async def lane(header: Header) -> None:
            work.add([header])

        await asyncio.gather(*map(lane, headers))  # the lanes that a turn of the loop has woken
        await work.finish()
        return asyncio.get_running_loop().time() - began_s

    assert run_virtual(main()) == pytest.approx(waits_s)
    assert scored == [headers]


@pytest.mark.parametrize(
    ("wait", "patience_s", "every_s"),
    [
        (Wait.WORK, 600.0, PROGRESS_SHARE * 600.0),
        (Wait.WORK, 2.0, PROGRESS_S),
        (Wait.SHARDS, 600.0, PROGRESS_S),
    ],
)
def test_work_on_records_shows_progress_by_its_deadline(
    wait: Wait, patience_s: float, every_s: float
) -> None:
    """Hundreds of requests on records are open at a time, and each sign of each is a message."""

    async def main() -> list[float]:
        signs_s: list[float] = []
        loop = asyncio.get_running_loop()
        service = Service("worker", Deadlines(patience_s))

        async def toil(request: None, call: Call) -> None:
            for _ in range(10 * 100):
                service.progress()
                await asyncio.sleep(0.1)

        service.add(Endpoint("toil", NoneType, NoneType, wait), toil)
        call = Call(lambda: signs_s.append(loop.time()))
        await service.handle("toil", b"\xc0", call, None)  # type: ignore[arg-type]
        return signs_s

    signs_s = run_virtual(main())
    gaps_s = [later - earlier for earlier, later in zip([0.0, *signs_s], signs_s, strict=False)]
    assert min(gaps_s) >= every_s
    assert max(gaps_s) <= every_s + 2 * PROGRESS_S
