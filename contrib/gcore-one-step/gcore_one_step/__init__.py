"""The plugin one-step: generation runs one step ahead of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.providers import CALLS, PARTS, ControllerProvider
from gcore_core.controllers.config import SyncConfig


@hookimpl
def gcore_controllers() -> Iterable[ControllerProvider]:
    yield ControllerProvider(
        summary="generates the next step's records while it trains on this one's",
        factory="gcore_one_step.program:OneStepProgram",
        config=SyncConfig,
        calls={**CALLS, "generator": frozenset({"generate", "push"})},
        parts=PARTS,
        trains_on_stale=True,
        overlaps=True,
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    if plan["controller"]["use"].partition("/")[0] != "one-step":
        return
    if plan["placement"]["sleep_in_training"] == "always":
        yield (
            "placement.sleep_in_training: one-step generates while it trains, so generators cannot "
            "sleep; set it to never."
        )
    if not plan["placement"]["use"].startswith("core/"):
        yield (
            "placement.use: one-step begins the next rollout before the push at which a placement "
            "policy moves devices; set it to core/even, or take controller.use: async."
        )
