"""What shards agree on, through the middle of the star."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gcore_core.contract.errors import ContractError
from gcore_core.contract.launching import Endpoint, Peer, Reply, Request
from gcore_core.runtime.agreements import KEPT, Agreements, AgreementService
from gcore_core.runtime.messages import (
    AGREE_COLLECT,
    AGREE_SUM,
    Agreement,
    CollectRequest,
    SumRequest,
)
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.retry import insist
from gcore_core.wire.service import Service


async def middle(shards: int) -> Peer:
    network, service = InlineNetwork(), Service("supervisor")
    AgreementService(shards).register(service)
    await network.view("supervisor").serve("supervisor", service)
    return network.view("controller").peer("supervisor")


async def all_shards(shards: int) -> list[Agreements]:
    peer = await middle(shards)
    return [Agreements(peer, shard, shards, insist) for shard in range(shards)]


@pytest.mark.parametrize("arrival", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
async def test_a_sum_is_taken_in_shard_order_whichever_shard_comes_first(
    arrival: tuple[int, ...],
) -> None:
    """Float addition is not associative: another order would be other bits."""
    parts = [np.array([1e16]), np.array([1.0]), np.array([-1e16]), np.array([1.0])]
    shards = await all_shards(4)
    found = await asyncio.gather(*(shards[i].sum("x", parts[i]) for i in arrival))
    assert [float(value[0]) for value in found] == [((1e16 + 1.0) - 1e16) + 1.0] * 4


async def test_a_sum_of_empty_lists_is_empty() -> None:
    found = await asyncio.gather(*(shard.sum("x", np.zeros(0)) for shard in await all_shards(2)))
    assert [value.shape for value in found] == [(0,), (0,)]


async def test_sums_of_different_lengths_fail_for_all() -> None:
    first, second = await all_shards(2)
    found = await asyncio.gather(
        first.sum("x", np.zeros(2)), second.sum("x", np.zeros(3)), return_exceptions=True
    )
    assert all(isinstance(error, Exception) for error in found)


async def test_only_the_lead_gets_what_is_collected() -> None:
    found = await asyncio.gather(
        *(s.collect("facts", f"of {s.shard}".encode()) for s in await all_shards(3))
    )
    assert found == [[b"of 0", b"of 1", b"of 2"], [], []]


async def test_every_shard_gets_what_is_shared() -> None:
    found = await asyncio.gather(
        *(s.share("look", f"of {s.shard}".encode()) for s in await all_shards(3))
    )
    assert found == [[b"of 0", b"of 1", b"of 2"]] * 3


async def test_a_collected_payload_over_the_limit_is_refused() -> None:
    (alone,) = await all_shards(1)
    with pytest.raises(ContractError, match=r"0/facts: \d+ bytes are too many to agree on"):
        await alone.collect("facts", bytes(17 << 20))


async def test_the_answer_of_the_lead_to_each_shard_depends_on_all_shards() -> None:
    async def lead(told: list[bytes]) -> list[bytes]:
        return [part + b" of " + b"".join(told) for part in told]

    shards = await all_shards(3)
    found = await asyncio.gather(*(s.ask("plan", b"%d" % s.shard, lead) for s in reversed(shards)))
    assert found == [b"2 of 012", b"1 of 012", b"0 of 012"]


async def test_each_other_shard_sends_the_lead_one_call() -> None:
    peer, asked = await middle(2), list[tuple[int, str]]()

    async def counted(
        peer: Peer,
        endpoint: Endpoint[Request, Reply],
        request: Request,
        deadline_s: float | None = None,
    ) -> Reply:
        assert isinstance(request, Agreement)
        asked.append((request.shard, endpoint.name))
        return await insist(peer, endpoint, request, deadline_s)

    async def lead(told: list[bytes]) -> list[bytes]:
        return told

    shards = [Agreements(peer, shard, 2, counted) for shard in range(2)]
    assert await asyncio.gather(*(s.ask("plan", b"%d" % s.shard, lead) for s in shards)) == [
        b"0",
        b"1",
    ]
    assert sorted(asked) == [(0, "agree.collect"), (0, "agree.deal"), (1, "agree.ask")]


async def test_a_lead_must_answer_every_shard() -> None:
    async def lead(told: list[bytes]) -> list[bytes]:
        return told * 2

    (alone,) = await all_shards(1)
    with pytest.raises(ContractError, match="0/plan: 2 parts for 1 shards"):
        await alone.ask("plan", b"", lead)


async def test_a_barrier_opens_when_the_last_has_come() -> None:
    first, second = await all_shards(2)
    early = asyncio.ensure_future(first.barrier("x"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not early.done()
    await asyncio.gather(early, second.barrier("x"))


async def test_consecutive_agreements_do_not_mix() -> None:
    async def shard(agree: Agreements) -> list[float]:
        return [
            float((await agree.sum("same name", np.array([float(turn)])))[0]) for turn in range(100)
        ]

    found = await asyncio.gather(*(shard(agree) for agree in await all_shards(2)))
    assert found == [[2.0 * turn for turn in range(100)]] * 2


async def test_agreements_of_two_scopes_need_no_order_between_them() -> None:
    """Two tasks of a shard agree side by side; which of them comes first differs between shards."""

    async def agree(shard: Agreements, names: tuple[str, str]) -> dict[str, float]:
        sums = {}
        for name in names:
            for turn in range(3):
                value = await shard.scope(name).sum("same name", np.array([float(turn)]))
                sums[f"{name}{turn}"] = float(value[0])
        return sums

    async def beside(shard: Agreements, first: str, second: str) -> dict[str, float]:
        parts = await asyncio.gather(agree(shard, (first,)), agree(shard, (second,)))
        return parts[0] | parts[1]

    one, other = await all_shards(2)
    async with asyncio.timeout(5):
        sums = await asyncio.gather(
            beside(one, "window", "training"), beside(other, "training", "window")
        )
    wanted = {f"{name}{turn}": 2.0 * turn for name in ("window", "training") for turn in range(3)}
    assert sums == [wanted, wanted]


async def test_shards_may_lead_in_one_scope_and_lag_in_another() -> None:
    one, other = await all_shards(2)
    ahead = asyncio.ensure_future(one.scope("window").sum("settled", np.array([1.0])))
    late = asyncio.ensure_future(other.sum("facts", np.array([5.0])))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert (await one.sum("facts", np.array([7.0])))[0] == 12.0
        assert (await other.scope("window").sum("settled", np.array([2.0])))[0] == 3.0
    assert [(await ahead)[0], (await late)[0]] == [3.0, 12.0]


async def test_a_scope_opened_again_continues_its_count() -> None:
    """Else its second agreement would have the key of its first, and get that one's answer."""
    (alone,) = await all_shards(1)
    sums = [await alone.scope("window").sum("x", np.array([value])) for value in (1.0, 2.0)]
    assert [float(value[0]) for value in sums] == [1.0, 2.0]


async def test_many_agreements_of_one_scope_leave_the_answers_of_another() -> None:
    """A shard whose answer was lost asks again, perhaps long after another scope has gone on."""
    peer = await middle(1)
    (alone,) = [Agreements(peer, 0, 1, insist)]
    await alone.scope("slow").sum("x", np.array([3.0]))
    for turn in range(2 * KEPT):
        await alone.scope("fast").sum("x", np.array([float(turn)]))
    again = SumRequest("slow:0/x", 0, [3.0])
    assert await peer.call(AGREE_SUM, again) == [3.0]
    # One that is forgotten would be a new agreement, in which another value is no contradiction.
    other = SumRequest("slow:0/x", 0, [4.0])
    with pytest.raises(ContractError, match="member 0 came twice with different values"):
        await peer.call(AGREE_SUM, other)


async def test_a_repeated_request_gets_the_same_answer_and_counts_once() -> None:
    peer = await middle(2)

    async def ask(shard: int) -> list[float]:
        return await peer.call(AGREE_SUM, SumRequest("7/x", shard, [1.0]))

    found = await asyncio.gather(ask(0), ask(0), ask(1))
    assert [*found, await ask(0)] == [[2.0]] * 4


async def test_the_lead_may_repeat_its_collecting_request() -> None:
    peer = await middle(2)

    async def ask(shard: int) -> list[bytes]:
        return await peer.call(AGREE_COLLECT, CollectRequest("7/x", shard, b"p"))

    await asyncio.gather(ask(0), ask(1))
    assert await ask(0) == [b"p", b"p"]
    assert await ask(1) == []
