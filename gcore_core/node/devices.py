"""Finds the devices of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.placement import Device


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

    devices: those of the worker.
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
