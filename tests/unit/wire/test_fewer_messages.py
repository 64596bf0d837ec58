"""With how many others a shard speaks: what it costs must follow from the records, not from the
number of shards.
"""

from __future__ import annotations

import asyncio
import math
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import pytest
from gcore_testing.simulation import SimulatedJob, run_virtual, simulate

from gcore_core.contract.deadlines import Deadlines, Wait
from gcore_core.contract.launching import Endpoint
from gcore_core.runtime import relay as relay_module
from gcore_core.runtime.messages import RelayedEndpoint, RelayRequest
from gcore_core.runtime.relay import Relay
from gcore_core.store.server import SlabService
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import PROGRESS_S, PROGRESS_SHARE, Call, Service


class Listening:
    """Counts who asks whom for what."""

    def __init__(self) -> None:
        self.heard: Counter[tuple[str, str, str]] = Counter()

    async def travel(self, source: str, target: str, method: str) -> int:
        self.heard[source, target, method] += 1
        return 1

    def asked(self, source: str, method: str) -> set[str]:
        """Whom ``source``, a role, asked for it."""
        return {
            target for who, target, what in self.heard if what == method and who.startswith(source)
        }


def listened(store: Path, **sizes: Any) -> Listening:
    weather = Listening()
    run_virtual(simulate(SimulatedJob(evaluate_prompts=0, **sizes), store, weather))
    return weather


@pytest.mark.parametrize("prompts", [4, 8, 16])
def test_shards_with_few_groups_each_use_different_replicas(prompts: int, tmp_path: Path) -> None:
    """Each to three of twelve, so that all have something to do and none hears more shards than it
    must.
    """
    told = listened(tmp_path / "store", shards=4, replicas=12, prompts=prompts, steps=1)
    asked = [told.asked(f"controller.{shard}", "generate") for shard in range(4)]
    assert [len(replicas) for replicas in asked] == [3] * 4
    assert len(set.union(*asked)) == 12


def test_shards_that_own_replicas_ask_no_others(tmp_path: Path) -> None:
    told = listened(tmp_path / "store", shards=4, replicas=9, prompts=32, owns_replicas=True)
    asked = [told.asked(f"controller.{shard}", "generate") for shard in range(4)]
    assert asked == [{f"rollout.{replica}" for replica in range(shard, 9, 4)} for shard in range(4)]


@pytest.mark.parametrize("replicas", [1, 4, 6])
def test_owning_replicas_changes_nothing_in_what_is_trained(replicas: int, tmp_path: Path) -> None:
    """Also where there are fewer replicas than shards, which a placement may leave awake."""
    job = SimulatedJob(shards=4, replicas=replicas)
    shared, owned = (
        run_virtual(simulate(replace(job, owns_replicas=owns), tmp_path / f"{owns}"))
        for owns in (False, True)
    )
    assert owned.batches == shared.batches
    assert all(np.array_equal(a, b) for a, b in zip(owned.logits, shared.logits, strict=True))


class Slow(Listening):
    """Replicas that hear of what they are to draw after so many seconds."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self._after_s = after_s

    async def travel(self, source: str, target: str, method: str) -> int:
        if method == "generate":
            await asyncio.sleep(self._after_s)
        return await super().travel(source, target, method)


@pytest.mark.parametrize("after_s", [2, 20, 200])
def test_shards_agree_less_often_in_longer_rollouts(after_s: float, tmp_path: Path) -> None:
    """Once a second at first, then once in a twentieth of the time so far: 20 looks, and 20 for
    each factor of e.
    """
    told = Slow(after_s)
    job = SimulatedJob(evaluate_prompts=0, shards=2, steps=1)
    outcome = run_virtual(simulate(job, tmp_path / "store", told))
    rollout_s = outcome.reports[-1].metrics["seconds/rollout"]
    looks = min(rollout_s, 20) + 20 * max(0.0, math.log(rollout_s / 20))
    assert rollout_s > after_s
    assert looks / 2 < told.heard["controller.1", "supervisor", "agree.share"] < looks + 8, (
        "eight are not of the rollout"
    )


def test_replicas_release_columns_of_shards_that_never_call_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: list[SlabService] = []
    open_store = SlabService.__init__

    def remembered(self: SlabService, *arguments: Any) -> None:
        open_store(self, *arguments)
        services.append(self)

    monkeypatch.setattr(SlabService, "__init__", remembered)
    told = listened(tmp_path / "store", shards=4, replicas=12, prompts=8, steps=3)
    assert len(told.asked("controller.0", "generate")) < 12
    assert services[0]._slabs == {}, "the last push ends the last step"


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_shards_reach_all_ranks_through_relays(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "RELAYED", 2)
    told = listened(tmp_path / "store", shards=3, ranks=ranks, prompts=8, steps=1)
    relays = {f"policy.{first}" for first in range(0, ranks, 2)}
    for method in ("prepare", "train"):
        for shard in range(3):
            assert told.asked(f"controller.{shard}", f"relay.{method}") == relays
        assert told.asked("controller", method) == set()
        pairs = {
            frozenset((source, target)) for source, target, what in told.heard if what == method
        }
        # A relay's own rank is part of no pair: what is for it needs no message.
        assert pairs == {
            frozenset((f"policy.{rank - 1}", f"policy.{rank}")) for rank in range(1, ranks, 2)
        }


async def relayed(shards: int) -> tuple[Any, list[list[str]]]:
    """(asks a relay in front of ranks a, of two workers, and b for a shard; what workers heard)."""
    network, heard = InlineNetwork(), list[list[str]]()
    endpoint = RelayedEndpoint("echo", list[str], list[str])

    def worker(name: str) -> Service:
        async def echo(parts: list[str], call: Call) -> list[str]:
            heard.append([name, *parts])
            return [f"{part} at {name[0]}" for part in parts]

        service = Service(name)
        Relay(network.view(name), service, shards).add(endpoint, echo)
        return service

    for name in ("a0", "a1", "b0"):
        await network.view(name).serve(name, worker(name))

    async def ask(shard: int, text: str) -> list[str]:
        parts = [msgspec.Raw(msgspec.msgpack.encode(f"{text} for {rank}")) for rank in "ab"]
        request = RelayRequest(1, shard, [["a0", "a1"], ["b0"]], parts)
        relay = network.view(f"controller.{shard}").peer("a0")
        return await relay.call(endpoint.of_relay, request)

    return ask, heard


async def test_a_rank_starts_when_all_shards_have_called_and_answers_each_separately() -> None:
    ask, heard = await relayed(2)
    first = asyncio.ensure_future(ask(1, "one"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not first.done() and heard == []
    assert await ask(0, "nought") == ["nought for a at a", "nought for b at b"]
    assert await first == ["one for a at a", "one for b at b"]
    wanted = [[name, f"nought for {name[0]}", f"one for {name[0]}"] for name in ("a0", "a1", "b0")]
    assert sorted(heard) == wanted


async def test_a_repeated_relay_request_gets_the_same_answer_and_reaches_no_rank_twice() -> None:
    ask, heard = await relayed(1)
    assert await ask(0, "x") == await ask(0, "x")
    assert len(heard) == 3


def test_progress_is_reported_at_most_once_a_second_and_not_at_the_start() -> None:
    async def main() -> list[float]:
        signs: list[float] = []
        service, loop = Service("worker"), asyncio.get_running_loop()

        async def toil(request: None, call: Call) -> None:
            for _ in range(350):
                service.progress()
                await asyncio.sleep(0.01)

        service.add(Endpoint("toil", NoneType, NoneType), toil)
        await service.handle("toil", b"\xc0", Call(lambda: signs.append(loop.time())), None)  # type: ignore[arg-type]
        return signs

    signs = run_virtual(main())
    assert len(signs) == 3
    assert all(
        later - earlier >= PROGRESS_S for earlier, later in zip([0.0, *signs], signs, strict=False)
    )


LIMITED = """
import resource
from gcore_core.node.spawn import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    allow_open_files(200)
except Exception as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def limited(soft: int, hard: int) -> str:
    code = LIMITED.format(soft=soft, hard=hard)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_the_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hard = 4096 if most < 0 else min(4096, most)
    assert limited(64, hard) == f"{hard}\n"


def test_error_for_too_few_open_files_names_the_needed_number() -> None:
    told = limited(64, 300)
    assert (
        "a process may open 300 files here, and one that speaks with 200 others needs 528." in told
    )
    assert "sudo prlimit --pid $$ --nofile=528, or lower controller.shards" in told


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
