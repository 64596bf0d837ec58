"""The plugin ``async``: generation runs ahead of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_async.config import AsyncConfig
from gcore_core import hookimpl
from gcore_core.contract.providers import CALLS, PARTS, ControllerProvider


@hookimpl
def gcore_controllers() -> Iterable[ControllerProvider]:
    yield ControllerProvider(
        summary="generates the next steps' records while it trains, and bounds their age",
        factory="gcore_async.program:AsynchronousController",
        config=AsyncConfig,
        calls={**CALLS, "generator": frozenset({"generate", "push"})},
        parts=PARTS,
        trains_on_stale=True,
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem where generators could not draw while the trainer works."""
    if plan["controller"]["use"].partition("/")[0] != "async":
        return
    if plan["placement"]["sleep_in_training"] == "always":
        yield (
            "placement.sleep_in_training: async generates while it trains, so generators cannot "
            "sleep; set it to never."
        )
