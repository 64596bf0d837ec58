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
        overlaps=True,
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem for what a run cannot do while generation goes on."""
    controller = plan["controller"]
    if controller["use"].partition("/")[0] != "async":
        return
    if plan["placement"]["sleep_in_training"] == "always":
        yield (
            "placement.sleep_in_training: async generates while it trains, so generators cannot "
            "sleep; set it to never."
        )
    settings = controller.get("config") or {}
    moves = not plan["placement"]["use"].startswith("core/")
    if moves and settings.get("midway", "wait") != "wait":
        yield (
            "controller.config.midway: a placement policy moves devices at pushes, and samples "
            "would be in flight there; set midway: wait, or placement.use: core/even."
        )
    runs_ahead = settings.get("ahead", 1)
    if plan["run"]["deterministic"] and runs_ahead and settings.get("midway", "wait") != "wait":
        yield (
            "controller.config.midway: a deterministic run cannot push weights into samples that "
            "run, since the clock says when a push comes; set it to wait."
        )
    objective = (plan.get("objective") or {}).get("config") or {}
    correction = objective.get("correction")  # the objectives of other plugins may have none
    uncorrected = correction is not None and correction.get("kind") == "none"
    if uncorrected and objective.get("old_logprobs") == "recompute":
        yield (
            "objective.config: recomputed log-probs alone do not correct for older weights; set "
            "objective.config.correction.kind: truncate, or old_logprobs: rollout."
        )
