"""``core/even`` gives every role its slots from all devices in turn, and never moves them."""

from __future__ import annotations

from gcore_core.contract.placement import Decision, Partition, Window, place_evenly


class Even:
    """Gives every role its slots from all devices in turn, and never moves them.

    They can share, because in preparation and training every device serves the trainer anyway.
    """

    def __init__(self, config: None = None) -> None:
        pass

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        return place_evenly(partition, window)
