"""What there is to place on, and where roles are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or a core on machines without one."""

    index: int
    kind: str  # "cuda" or "cpu"
    node: str = "node0"


@dataclass(frozen=True)
class Cell:
    """The devices that hold whole replicas of a role; the unit of a move."""

    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Partition:
    """Which cells each role has in one phase."""

    cells: Mapping[str, tuple[Cell, ...]]

    def devices(self, role: str, rank: int) -> tuple[int, ...]:
        """Device indexes of one worker of the role."""
        return tuple(device.index for device in self.cells[role][rank].devices)


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a policy sees: the devices, and the slots every role asks for. Measurements join it as they are taken."""

    devices: tuple[Device, ...]
    slots: Mapping[str, int]


class PlacementPolicy(Protocol):
    def revise(self, partition: Partition | None, window: Window) -> Partition:
        """The partition for the next step; ``partition`` is None before the first. Pure.

        Raises PlacementError naming the role that does not fit.
        """


def find_devices(wanted: str | int) -> tuple[Device, ...]:
    """The machine's devices: GPUs where the driver shows some, else cores; or as many as ``wanted`` says."""
    gpus = _gpu_count()
    kind = "cuda" if gpus else "cpu"
    count = int(wanted) if str(wanted) != "auto" else gpus or len(os.sched_getaffinity(0))
    return tuple(Device(index=index, kind=kind) for index in range(count))


def _gpu_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0
