"""The plugin ``async``: generation runs ahead of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_async.config import AsyncConfig
from gcore_core import hookimpl
from gcore_core.contract.preflight import ResolvedJob
from gcore_core.contract.providers import CALLS, PARTS, ControllerProvider


@hookimpl
def gcore_controllers() -> Iterable[ControllerProvider]:
    yield ControllerProvider(
        summary="generates the next steps' records while it trains, and bounds their age",
        factory="gcore_async.program:AsynchronousController",
        config=AsyncConfig,
        calls={**CALLS, "generator": frozenset({"generate", "push"})},
        parts=PARTS,
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any], job: ResolvedJob) -> Iterable[str]:
    """Yields a problem for what a run cannot do while generation goes on."""
    if plan["controller"]["use"].partition("/")[0] != "async":
        return
    from gcore_async.checks import problems_of

    yield from problems_of(plan, job)
