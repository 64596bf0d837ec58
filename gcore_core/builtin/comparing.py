"""The step check of a sentinel that brings none: it asks the sentinel, and names the replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_core.contract.installing import install_command
from gcore_core.contract.step_check import Evidence, StepCheck, StepCheckContext, mismatch

_SEARCH = f"sentinel.use: sentinel looks for the cause ({install_command('gcore-sentinel')})"


class Comparing(StepCheck):
    """Ends the run at the first alarm of the sentinel; it looks for no cause."""

    def __init__(self, config: None, context: StepCheckContext) -> None:
        self._context = context
        self._sentinel = context.sentinel

    async def updated(self, step: int, evidence: Evidence) -> dict[str, float]:
        alarms = self._sentinel.judge(step, evidence)
        if alarms:
            context = self._context
            names = context.workers.generators
            cause = alarms[0].cause, _SEARCH
            raise mismatch(step, alarms, evidence, names, saves=context.saves, cause=cause)
        return self._sentinel.metrics()

    def notes(self) -> list[str]:
        return self._sentinel.notes()

    def state(self) -> dict[str, Any]:
        return self._sentinel.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sentinel.restore(state)
