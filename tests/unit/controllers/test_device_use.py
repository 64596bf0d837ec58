"""The share of a rollout in which devices were in use, from what the node's agent reads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gcore_core.contract.errors import PluginBroken
from gcore_core.contract.placement import Device
from gcore_core.controllers.placement.measurements import Gauge, NodeGauge
from gcore_core.node.devices import Metering
from gcore_core.runtime.messages import METER, MeterReply, MeterRequest

WORKERS = {"rollout.0": [0], "rollout.1": [1], "judge.0": [0]}


class Agent:
    """Answers with readings that were made before.

    readings: (seconds of use of devices 0 and 1, clock).
    """

    name = "agent.0"

    def __init__(self, *readings: tuple[dict[int, float], float]) -> None:
        self._readings = list(readings)
        self.requests: list[MeterRequest] = []

    async def call(self, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        assert endpoint is METER
        self.requests.append(request)
        return MeterReply(*self._readings.pop(0))


def node(agent: Agent, first: int = 0) -> NodeGauge:
    """Returns a node with WORKERS, whose first device is the run's number ``first``."""
    devices = {
        name: [Device(index=first + number, kind="cpu", number=number) for number in numbers]
        for name, numbers in WORKERS.items()
    }
    return NodeGauge(agent, devices)  # type: ignore[arg-type]


async def shares(*agents: Agent, rollouts: int = 1) -> dict[int, float]:
    nodes = [node(agent, first=2 * number) for number, agent in enumerate(agents)]
    gauge = Gauge("my:Meter", nodes)
    for _ in range(rollouts):
        gauge.begin()
        await asyncio.sleep(0)
        gauge.end()
        await asyncio.sleep(0)
    return await gauge.shares()


def test_the_share_is_of_the_time_between_both_readings() -> None:
    agent = Agent(({0: 1.0, 1: 7.0}, 100.0), ({0: 3.0, 1: 7.5}, 104.0))
    assert asyncio.run(shares(agent)) == pytest.approx({0: 0.5, 1: 0.125})
    assert agent.requests == [MeterRequest("my:Meter", WORKERS)] * 2


def test_a_share_is_at_most_one_and_only_of_devices_read_twice() -> None:
    agent = Agent(({0: 1.0}, 100.0), ({0: 9.0, 1: 7.5}, 104.0))
    assert asyncio.run(shares(agent)) == {0: 1.0}


def test_each_node_numbers_its_own_devices_and_has_its_own_clock() -> None:
    one = Agent(({0: 1.0, 1: 7.0}, 100.0), ({0: 3.0, 1: 7.5}, 104.0))
    other = Agent(({0: 0.0, 1: 0.0}, 5000.0), ({0: 1.0, 1: 2.0}, 5002.0))
    assert asyncio.run(shares(one, other)) == pytest.approx({0: 0.5, 1: 0.125, 2: 0.5, 3: 1.0})
    assert other.requests == [MeterRequest("my:Meter", WORKERS)] * 2


def test_only_the_latest_rollout_counts() -> None:
    agent = Agent(({0: 0.0}, 0.0), ({0: 4.0}, 4.0), ({0: 4.0}, 8.0), ({0: 5.0}, 12.0))
    assert asyncio.run(shares(agent, rollouts=2)) == pytest.approx({0: 0.25})


def test_nothing_is_known_before_the_first_rollout() -> None:
    assert asyncio.run(shares(Agent(), rollouts=0)) == {}


class Told:
    """A meter that keeps what it was asked."""

    made: list[Told] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.asked: list[Mapping[int, Sequence[int]]] = []
        self.is_closed = False
        self.made.append(self)

    def used_s(self, devices: Mapping[int, Sequence[int]]) -> dict[int, float]:
        self.asked.append(devices)
        return dict.fromkeys(devices, 1.0)

    def close(self) -> None:
        self.is_closed = True


def test_the_agent_makes_one_meter_and_shows_it_the_workers_that_live_there() -> None:
    metering = Metering()
    request = MeterRequest(f"{__name__}:Told", {**WORKERS, "elsewhere.0": [5]})
    pids = {"rollout.0": 11, "rollout.1": 12, "judge.0": 13}
    for _ in range(2):
        reply = asyncio.run(metering.read(request, pids))
    metering.close()
    (meter,) = Told.made
    assert meter.asked == [{0: [11, 13], 1: [12]}] * 2
    assert reply.used_s == {0: 1.0, 1: 1.0}
    assert meter.is_closed


def test_a_meter_that_does_not_import_is_named() -> None:
    with pytest.raises(PluginBroken, match="no_such_module"):
        asyncio.run(Metering().read(MeterRequest("no_such_module:Meter", {}), {}))
