"""Has a node's agent read how long devices were in use, by a meter of the placement policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from gcore_core.contract.factories import import_attribute
from gcore_core.contract.metering import Meter
from gcore_core.runtime.messages import MeterReply, MeterRequest


class Metering:
    """Makes the meter at the first reading and keeps it, since a meter counts from its start."""

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}  # by factory; a run has one
        self._lock = asyncio.Lock()

    async def read(self, request: MeterRequest, pids: Mapping[str, int]) -> MeterReply:
        """Asks the meter, beside the event loop: a driver may take its time.

        pids: name of a living worker of this node -> its process. Workers of other nodes are
            left out.

        Raises PluginBroken or ConfigError where there can be no meter.
        """
        devices: dict[int, list[int]] = {}
        for name, indexes in request.workers.items():
            for index in indexes if name in pids else ():
                devices.setdefault(index, []).append(pids[name])
        async with self._lock:
            return await asyncio.to_thread(self._ask, request.meter, devices)

    def _ask(self, factory: str, devices: Mapping[int, list[int]]) -> MeterReply:
        if factory not in self._meters:
            self._meters[factory] = import_attribute(factory)()
        used_s = self._meters[factory].used_s(devices)
        return MeterReply(used_s, time.monotonic())

    def close(self) -> None:
        """Closes the meter, where there is one."""
        for meter in self._meters.values():
            meter.close()
        self._meters.clear()
