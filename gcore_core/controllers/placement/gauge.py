"""Measures which share of a rollout each device was in use, where the placement policy asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gcore_core.contract.launching import Peer
from gcore_core.runtime.messages import METER, MeterReply, MeterRequest
from gcore_core.runtime.rpc.retry import insist


class Gauge:
    """Has the node's agent read the meter when a rollout begins and ends; the lead has one.

    A reading is a task beside the rollout, which does not wait for it. The agent's clock is part of
    the reading, so a late one costs no accuracy.
    """

    def __init__(self, agent: Peer, meter: str, workers: Mapping[str, Sequence[int]]) -> None:
        """Reads nothing yet.

        meter: the factory of the meter.
        workers: name of each generator's worker -> the indexes of its devices.
        """
        self._agent = agent
        self._request = MeterRequest(meter, {name: list(ids) for name, ids in workers.items()})
        self._readings: list[asyncio.Task[MeterReply]] = []

    def begin(self) -> None:
        """Begins a rollout: what was read before is forgotten."""
        for task in self._readings:
            task.cancel()
        self._readings = []
        self._read()

    def end(self) -> None:
        """Ends the rollout."""
        self._read()

    def _read(self) -> None:
        self._readings.append(asyncio.ensure_future(insist(self._agent, METER, self._request)))

    async def shares(self) -> dict[int, float]:
        """Returns device index -> share of the latest rollout in which it was in use, 0 to 1.

        It is empty before the first rollout. Raises what the meter raised.
        """
        readings = self._readings
        if len(readings) < 2:
            return {}
        first, last = await readings[0], await readings[-1]
        lasted_s = max(last.clock_s - first.clock_s, 1e-9)
        both = first.used_s.keys() & last.used_s.keys()
        # A worker of several threads may use more processor time than its devices, which are cores.
        return {
            index: min((last.used_s[index] - first.used_s[index]) / lasted_s, 1.0)
            for index in sorted(both)
        }
