"""Defines what the core calls on a meter, which reads how long devices were in use.

A placement policy's config names meters by ``meters``, see ``gcore_core.contract.traits``. The
node's agent makes one, which reads for all workers of its machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Meter(Protocol):
    """Reads how long devices were in use. Its factory is called with nothing.

    The factory raises ConfigError where nothing can be read, such as without a driver, and the
    error says what to install. ``g-core check`` makes a meter, asks it once and closes it.
    """

    def used_s(self, devices: Mapping[int, Sequence[int]]) -> dict[int, float]:
        """Returns device index -> seconds of full use, counted from any fixed time.

        Seconds never get fewer from one call to the next. Half an hour at half load is a quarter of
        an hour. Of a device that cannot be read there is nothing.

        devices: device index -> pids of the workers that have it; with several devices, a worker
            is listed under each. A pid may have ended.

        Raises ConfigError where the reading fails and would fail again.
        """

    def close(self) -> None:
        """Ends what it has started; no other call follows."""
