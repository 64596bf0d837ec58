"""``core/even``: every role takes its slots from all devices in turn, and keeps them."""

from __future__ import annotations

from itertools import count

from gcore_core.errors import PlacementError
from gcore_core.placement.devices import Cell, Decision, Partition, Window


class Even:
    """Roles share devices: in preparation and training every device serves the trainer anyway."""

    def __init__(self, config: None = None) -> None:
        pass

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        if partition is None:
            return Decision(
                partition=every_slot(window),
                reason="every role takes its slots from all devices in turn",
            )
        return Decision(partition=partition, reason="roles keep their devices")


def every_slot(window: Window) -> Partition:
    """Cells for every slot that roles may occupy, from all devices in turn: of as many devices as a
    generator's replica spreads over, else of one.
    """
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
        need = window.needs.get(role)
        size = need.size if need is not None and need.kind == "generator" else 1
        cells[role] = tuple(Cell(tuple(taken[i : i + size])) for i in range(0, slots, size))
    return Partition(cells)
