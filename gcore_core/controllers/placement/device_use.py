"""Measures how much of a rollout the devices of generators were in use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gcore_core.contract.launching import Peer
from gcore_core.contract.placement import Device
from gcore_core.runtime.messages import METER, MeterReply, MeterRequest
from gcore_core.wire.retry import insist


class Gauge:
    """Has each node's agent read the meter when a rollout begins and ends; the lead has one.

    A reading is a task beside the rollout, which does not wait for it. The agent's clock is part of
    the reading, so a late one costs no accuracy, and clocks of nodes need not agree.
    """

    def __init__(self, meter: str, nodes: Sequence[NodeGauge]) -> None:
        """Reads nothing yet.

        meter: the factory of the meter.
        nodes: those on which generators have devices.
        """
        self._nodes = nodes
        self._requests = [MeterRequest(meter, node.numbers()) for node in nodes]
        self._readings: list[asyncio.Future[list[MeterReply]]] = []

    def begin(self) -> None:
        """Begins a rollout: what was read before is forgotten."""
        for reading in self._readings:
            reading.cancel()
        self._readings = []
        self._read()

    def end(self) -> None:
        """Ends the rollout."""
        self._read()

    def _read(self) -> None:
        replies = (
            insist(node.agent, METER, request)
            for node, request in zip(self._nodes, self._requests, strict=True)
        )
        self._readings.append(asyncio.gather(*replies))

    async def shares(self) -> dict[int, float]:
        """Returns device index -> share of the latest rollout in which it was in use, 0 to 1.

        It is empty before the first rollout. Raises what the meter raised.
        """
        if len(self._readings) < 2:
            return {}
        first = await self._readings[0]
        last = await self._readings[-1]
        shares: dict[int, float] = {}
        for node, before, after in zip(self._nodes, first, last, strict=True):
            shares |= node.shares(before, after)
        return dict(sorted(shares.items()))


class NodeGauge:
    """Knows one node's part of the generators.

    agent: the node's agent.
    workers: name of each generator's worker on the node -> its devices.
    """

    def __init__(self, agent: Peer, workers: Mapping[str, Sequence[Device]]) -> None:
        self.agent = agent
        self._workers = workers
        # The meter numbers devices as its node does, the placement policy those of all nodes.
        self._index_of = {
            device.local_index: device.index for devices in workers.values() for device in devices
        }

    def numbers(self) -> dict[str, list[int]]:
        """Returns worker -> the numbers of its devices on the node."""
        return {
            name: [device.local_index for device in devices]
            for name, devices in self._workers.items()
        }

    def shares(self, before: MeterReply, after: MeterReply) -> dict[int, float]:
        """Returns device index -> share of the time between two readings in which it was in use."""
        lasted_s = max(after.clock_s - before.clock_s, 1e-9)
        both = before.used_s.keys() & after.used_s.keys()
        # A worker of several threads may use more processor time than its devices, which are cores.
        return {
            self._index_of[number]: min(
                (after.used_s[number] - before.used_s[number]) / lasted_s, 1.0
            )
            for number in both
        }
