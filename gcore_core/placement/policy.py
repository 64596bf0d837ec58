"""``core/even``: every role takes its slots from all devices in turn, and keeps them."""

from __future__ import annotations

from itertools import count

from gcore_core.errors import PlacementError
from gcore_core.placement.devices import Cell, Partition, Window


class Even:
    """Roles share devices: in preparation and training every device serves the trainer anyway."""

    def __init__(self, config: None = None) -> None:
        pass

    def revise(self, partition: Partition | None, window: Window) -> Partition:
        if partition is not None:
            return partition
        cells, turn = {}, count()
        for role, slots in window.slots.items():
            if slots > len(window.devices):
                raise PlacementError(
                    f"wants {slots} slots, there are {len(window.devices)} devices",
                    where=f"roles.{role}.slots",
                    why="a role has at most one worker per device",
                    todo="ask for fewer slots, or set cluster.devices to the number that may be used",
                    role=role,
                )
            taken = [window.devices[next(turn) % len(window.devices)] for _ in range(slots)]
            cells[role] = tuple(Cell((device,)) for device in taken)
        return Partition(cells)
