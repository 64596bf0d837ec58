"""Finds the devices of this machine."""

from __future__ import annotations

import os
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


def _gpu_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0
