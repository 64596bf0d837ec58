"""The step check of a sentinel that brings none: it asks the sentinel, and names the replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_core.contract.installing import install_command
from gcore_core.contract.plugin_code import PluginCode
from gcore_core.contract.step_check import (
    Evidence,
    StepCheckContext,
    blamed,
    mismatch,
    versions_of,
)


class Comparing:
    """Ends the run at the first alarm of the sentinel; it looks for no cause."""

    def __init__(self, config: None, context: StepCheckContext) -> None:
        self._context = context
        self._sentinel = context.sentinel
        self._code = PluginCode(
            made=context.sentinel,
            kind="sentinel",
            provider=context.provider,
            where="sentinel.use",
            contract="SentinelContract",
        )

    async def before_update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict(metrics)

    async def updated(self, step: int, evidence: Evidence) -> dict[str, float]:
        alarms = self._code.call(self._sentinel.judge, step, evidence)
        if not alarms:
            return self._code.call(self._sentinel.metrics)
        replicas, names = blamed(alarms, self._context.workers.generators)
        versions = versions_of(evidence, replicas)
        which = ", ".join(map(str, versions))
        raise mismatch(
            step,
            names,
            alarms,
            f"{alarms[0].text}; records of this step are of version {which}\n"
            f"sentinel.use: sentinel looks for the cause ({install_command('gcore-sentinel')})",
            versions=versions,
            saves=self._context.saves,
            cause=alarms[0].cause,
        )

    async def pushed(self, version: int) -> None:
        pass

    def notes(self) -> list[str]:
        return self._sentinel.notes()

    def state(self) -> dict[str, Any]:
        return self._sentinel.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sentinel.restore(state)

    def end(self) -> None:
        pass
