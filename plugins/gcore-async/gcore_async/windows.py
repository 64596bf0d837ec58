"""Makes the window of a run from its settings."""

from __future__ import annotations

import os

from gcore_async.config import AsyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.window import RunningWindow


def running_window(
    context: ControllerContext, config: AsyncConfig, placement: PlacementShard
) -> RunningWindow:
    """Returns what produces groups without a break, as far ahead as the settings say."""
    return RunningWindow(
        context,
        config,
        placement,
        ahead=config.ahead,
        age=config.age,
        replay=None if config.replay is None else os.path.expanduser(config.replay),
        by_clock=config.order == "clock",
        cuts=config.cuts_samples(),
        keeps=config.keeps_unfinished() or config.repeats_cuts(),
    )
