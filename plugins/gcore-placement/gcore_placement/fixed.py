"""Provides the policies that never change what they have chosen.

They are ``colocated``, ``coresident`` and ``split``.
"""

from __future__ import annotations

from dataclasses import replace

from gcore_core.contract.errors import PlacementError
from gcore_core.contract.placement import Decision, Mode, Partition, place_evenly
from gcore_placement.cells import Rescue, Split, decide, find_pool
from gcore_placement.config import SplitConfig
from gcore_placement.measuring import MeasuredWindow, Measuring


class _Together(Measuring):
    """Places all generators on all cells. Raises PlacementError where they cannot all be there.

    mode: how the generators share a cell.
    reason: what decisions give as their reason.
    """

    mode: Mode
    reason: str

    def __init__(self, config: None = None) -> None:
        pass

    def choose(self, partition: Partition | None, window: MeasuredWindow) -> Decision:
        """Returns the same placement in every step; see the contract's placement policy.

        Raises PlacementError when a role has fewer slots than the others, and where roles would
        take turns in a run in which generation never ends.
        """
        pool = find_pool(window)
        if pool is None:
            return place_evenly(partition, window)
        if self.mode == "colocated" and window.overlaps:
            raise PlacementError(
                "a cell judges once all answers are there, and generation does not end under this "
                "step program.",
                where="placement.use",
                why="the step program has generators draw while the trainer works",
                todo="use placement/split or placement/replay, or controller core/sync",
                role=pool.judges[0],
            )
        if not pool.shared():
            raise PlacementError(
                (
                    f"in mode {self.mode} every generator runs in every cell, so all must have the "
                    "same number of slots."
                ),
                where=f"roles.{pool.judges[0]}.slots",
                why=(
                    f"{pool.policy} may occupy {pool.most_policy} cells, judges "
                    f"{pool.most_judge} of {len(pool.cells)}"
                ),
                todo="give each of them the slots of all devices, or use placement/split",
            )
        return replace(decide(window, pool, Split(self.mode)), reason=self.reason)


class Colocated(_Together):
    """Has all cells sample until all answers are there, then all judge."""

    mode = "colocated"
    reason = "every cell samples until all answers are there, then every cell judges"


class Coresident(_Together):
    """Has the policy and the judges awake in every cell."""

    mode = "coresident"
    reason = "both models are awake in every cell"


class FixedSplit(Measuring, Rescue):
    """Gives the judges a fixed number or share of the cells, whatever is measured."""

    def __init__(self, config: SplitConfig) -> None:
        self._config = config

    def choose(self, partition: Partition | None, window: MeasuredWindow) -> Decision:
        """Returns the same split in every step; see the contract's placement policy."""
        pool = find_pool(window)
        if pool is None:
            return place_evenly(partition, window)
        judge_cells = self._config.cells or self._config.share * len(pool.cells)
        split = pool.limited(judge_cells)
        reason = f"the judges' cells are fixed at {split.judge} of {len(pool.cells)}"
        return replace(decide(window, pool, split), reason=reason)
