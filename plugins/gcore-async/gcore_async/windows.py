"""Makes the window of a run from its settings."""

from __future__ import annotations

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
        keeps=config.keeps_unfinished(),
    )
