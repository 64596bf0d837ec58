"""Provides ``placement/utilisation``, which moves cells away from the role that is used less.

It moves the configured number of cells after a step, one by default (arXiv 2507.22789), and is
there for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gcore_core.contract.placement import Decision, Partition, place_evenly
from gcore_placement.cells import Rescue, decide, find_pool, split_of
from gcore_placement.config import UtilisationConfig
from gcore_placement.measuring import MeasuredWindow, Measuring


class Utilisation(Measuring, Rescue):
    """Moves cells to the role that was used more in the latest step, if the difference is large."""

    def __init__(self, config: UtilisationConfig) -> None:
        self._config = config

    def choose(self, partition: Partition | None, window: MeasuredWindow) -> Decision:
        """Moves ``config.cells`` cells to the judges if they are used more, else to the policy.

        Nothing moves while the difference is at most ``config.threshold``. The first split has
        ``config.share``.
        """
        pool = find_pool(window)
        if pool is None:
            return place_evenly(partition, window)
        config = self._config
        previous_split = split_of(partition, pool) if partition else None
        if previous_split is None:
            split = pool.limited(config.share * len(pool.cells))
            return replace(
                decide(window, pool, split), reason="nothing is measured yet: the configured share"
            )
        used = _measured(window, config.signal)
        policy = used.get(pool.policy, 0.0)
        # Judges that were not measured are left out of the mean.
        judges = [used[judge] for judge in pool.judges if judge in used]
        judge = sum(judges) / len(judges) if judges else 0.0
        move = (
            0
            if abs(policy - judge) <= config.threshold
            else config.cells
            if judge > policy
            else -config.cells
        )
        split = pool.limited(previous_split.judge + move)
        signal_text = f"{config.signal}: policy {policy:.0%}, judge {judge:.0%}"
        reason = (
            f"{signal_text}, so {abs(split.judge - previous_split.judge)} cells move"
            if used
            else "nothing was measured"
        )
        seen = {"signal": config.signal, "policy": policy, "judge": judge}
        return replace(decide(window, pool, split), reason=reason, seen=seen)


def _measured(window: MeasuredWindow, signal: str) -> Mapping[str, float]:
    """Returns role -> what a signal says of it, 0 to 1."""
    signals = {"busy": window.busy, "filled": window.filled, "hardware": window.used}
    return signals[signal]
