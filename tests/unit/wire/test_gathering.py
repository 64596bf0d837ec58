"""Meeting points: one action when all have come, one result for everybody, however often they
ask.
"""

from __future__ import annotations

import asyncio
import math
import traceback

import msgspec
import pytest

from gcore_core.contract.errors import ContractError, DataError
from gcore_core.runtime.messages import SumRequest
from gcore_core.wire.gathering import Gathering


class Action:
    def __init__(self) -> None:
        self.runs: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, values: list[str]) -> str:
        await self.gate.wait()
        self.runs.append(values)
        return "+".join(values)


async def test_the_action_runs_once_with_values_in_member_order() -> None:
    gathering, act = Gathering(3), Action()
    results = await asyncio.gather(*(gathering.join("step 1", m, f"v{m}", act) for m in (2, 0, 1)))
    assert results == ["v0+v1+v2"] * 3
    assert act.runs == [["v0", "v1", "v2"]]


async def test_no_member_is_answered_before_the_last_has_come() -> None:
    gathering, act = Gathering(2), Action()
    first = asyncio.ensure_future(gathering.join("k", 0, "a", act))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not first.done() and not act.runs
    assert await gathering.join("k", 1, "b", act) == await first == "a+b"


async def test_a_repeated_request_gets_the_same_result_without_running_again() -> None:
    gathering, act = Gathering(1), Action()
    assert [await gathering.join("k", 0, "a", act) for _ in range(3)] == ["a"] * 3
    assert len(act.runs) == 1


async def test_a_repeated_request_during_the_action_waits_for_it() -> None:
    gathering, act = Gathering(1), Action()
    act.gate.clear()
    first = asyncio.ensure_future(gathering.join("k", 0, "a", act))
    await asyncio.sleep(0)
    again = asyncio.ensure_future(gathering.join("k", 0, "a", act))
    await asyncio.sleep(0)
    act.gate.set()
    assert await asyncio.gather(first, again) == ["a", "a"]
    assert len(act.runs) == 1


async def test_another_value_under_the_same_key_is_refused() -> None:
    gathering, act = Gathering(2), Action()
    waiting = asyncio.ensure_future(gathering.join("step 4", 0, "a", act))
    await asyncio.sleep(0)
    with pytest.raises(ContractError, match="step 4: member 0 came twice with different values"):
        await gathering.join("step 4", 0, "b", act)
    waiting.cancel()


async def test_the_action_outlives_the_member_that_came_last() -> None:
    gathering, act = Gathering(2), Action()
    act.gate.clear()
    first = asyncio.ensure_future(gathering.join("k", 0, "a", act))
    last = asyncio.ensure_future(gathering.join("k", 1, "b", act))
    await asyncio.sleep(0)
    last.cancel()  # its connection broke
    act.gate.set()
    assert await first == "a+b"
    assert await gathering.join("k", 1, "b", act) == "a+b"
    assert len(act.runs) == 1


async def test_a_failure_reaches_every_member_and_is_not_tried_again() -> None:
    tries = []

    async def fail(values: list[str]) -> None:
        tries.append(values)
        raise DataError("no rows")

    gathering = Gathering(2)
    found = await asyncio.gather(
        *(gathering.join("k", m, "v", fail) for m in range(2)), return_exceptions=True
    )
    assert [type(error) for error in found] == [DataError] * 2
    with pytest.raises(DataError):
        await gathering.join("k", 0, "v", fail)
    assert len(tries) == 1


async def test_only_the_last_keys_are_remembered() -> None:
    gathering, act = Gathering(1, keep=4), Action()
    for key in range(100):
        await gathering.join(key, 0, str(key), act)
    assert len(gathering._open) <= 5
    assert await gathering.join(99, 0, "99", act) == "99"
    assert len(act.runs) == 100


async def test_abandoning_releases_waiting_members_and_keeps_results() -> None:
    gathering, act = Gathering(2), Action()
    await asyncio.gather(*(gathering.join("done", m, "v", act) for m in range(2)))
    waiting = asyncio.ensure_future(gathering.join("open", 0, "v", act))
    await asyncio.sleep(0)
    gathering.abandon(ContractError("over"))
    with pytest.raises(ContractError, match="over"):
        await waiting
    assert await gathering.join("done", 0, "v", act) == "v+v"


async def test_a_repeated_request_with_a_number_that_is_none_is_the_same() -> None:
    """Such as a sum over shards, one of which has no finite loss; its reply may be lost."""

    def request() -> SumRequest:  # as it comes twice over a socket
        sent = msgspec.msgpack.encode(SumRequest("window:3/settled", 0, [1.0, math.nan]))
        return msgspec.msgpack.decode(sent, type=SumRequest)

    async def act(requests: list[SumRequest]) -> int:
        return len(requests)

    gathering = Gathering(1)
    assert [await gathering.join("k", 0, request(), act) for _ in range(2)] == [1, 1]


async def test_a_result_that_came_late_is_remembered_as_long_as_any() -> None:
    """Its key began before others that were finished long ago."""
    gathering, slow, act = Gathering(1, keep=2), Action(), Action()
    slow.gate.clear()
    waiting = asyncio.ensure_future(gathering.join("slow", 0, "a", slow))
    await asyncio.sleep(0)
    for key in ("k1", "k2", "k3"):
        await gathering.join(key, 0, key, act)
    slow.gate.set()
    assert await waiting == "a"
    await gathering.join("k4", 0, "k4", act)
    assert await gathering.join("slow", 0, "a", slow) == "a"
    assert len(slow.runs) == 1


async def test_everybody_who_asks_gets_the_line_that_raised() -> None:
    """Also who asks when the others have had their answer. An error that is awaited again and again
    would name the line that waits, which is ours, and not that of a plugin.
    """
    gathering = Gathering(2)

    async def fail(values: list[str]) -> str:
        raise DataError("it failed")

    async def lines() -> list[str]:
        with pytest.raises(DataError) as raised:
            await gathering.join("k", 0, "a", fail)
        return [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]

    first = asyncio.ensure_future(lines())
    await asyncio.sleep(0)
    with pytest.raises(DataError):
        await gathering.join("k", 1, "b", fail)
    assert {names[-1] for names in [await first, *[await lines() for _ in range(3)]]} == {"fail"}
