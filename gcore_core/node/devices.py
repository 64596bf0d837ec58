"""Finds the devices of this machine, and has a meter read how long they were in use."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gcore_core.contract.factories import import_attribute
from gcore_core.contract.metering import Meter
from gcore_core.contract.placement import Device
from gcore_core.runtime.messages import MeterReply, MeterRequest


def find_devices(devices: str | int) -> tuple[Device, ...]:
    """Returns the devices of this machine: its GPUs where the driver shows some, else its cores.

    devices: how many there are to be; "auto": as many as this machine has.
    """
    gpus = _gpu_count()
    kind = "cuda" if gpus else "cpu"
    present = gpus or len(os.sched_getaffinity(0))
    count = present if str(devices) == "auto" else int(devices)
    return tuple(Device(index=index, kind=kind) for index in range(count))


def share_of_cores(devices: Sequence[int], in_use: int) -> int:
    """Returns how many CPU threads a worker may use: its part of this machine's cores.

    devices: the worker's.
    in_use: how many devices of this machine are in use while it works, its own among them.
    """
    cores = len(os.sched_getaffinity(0))
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal():
        cores = min(cores, int(limit))
    return max(1, cores * len(devices) // max(1, in_use))


def _gpu_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


class Metering:
    """Reads a meter of the placement policy for a node's agent.

    The meter is made at the first reading and kept, since it counts from its start.
    """

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}  # by factory; a run has one
        self._lock = asyncio.Lock()

    async def read(self, request: MeterRequest, pids: Mapping[str, int]) -> MeterReply:
        """Asks the meter in a thread, since a driver may take its time.

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
