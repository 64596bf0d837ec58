"""``core/in-order`` gives records to ranks in the order they come, equally many to each rank."""

from __future__ import annotations

import numpy as np

from gcore_core.contract.algorithms import Work


class InOrder:
    """Splits records by number alone, whatever they cost."""

    def __init__(self, config: None = None) -> None:
        pass

    def costs(self, work: Work) -> np.ndarray:
        """Returns the length of each record and what it costs besides (``Work.extra``), in tokens.

        ``split`` does not use it. The core does: for metrics, and where it deals whole groups or
        tiles itself.
        """
        return np.asarray(work.lengths + work.extra)

    def split(self, work: Work, bins: int) -> list[list[int]]:
        """Returns contiguous runs of indexes, whose sizes differ by at most one."""
        return [part.tolist() for part in np.array_split(np.arange(len(work)), bins)]
