"""``core/band``: no action's log-prob may be off by more than the pair's band.

``Comparing`` is the step check of each sentinel that brings none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore_core.contract.installing import install_command
from gcore_core.contract.sentinel import Alarm, Compared, Finding, SentinelContext, Source
from gcore_core.contract.step_check import Evidence, StepCheck, StepCheckContext, mismatch


class Band:
    """Counts the actions whose gap is over the band; one is enough for an alarm."""

    def __init__(self, config: object, context: SentinelContext) -> None:
        self._band = context.band

    def measure(self, records: Sequence[Compared]) -> np.ndarray:
        """Returns float64[records, 2]: actions over the band, actions compared.

        A log-prob that is not a number is over it.
        """
        numbers = np.zeros((len(records), 2))
        for row, record in zip(numbers, records, strict=True):
            gap = np.abs(record.rollout_logp - record.trainer_logp)[record.mask]
            row[:] = np.count_nonzero(~(gap <= self._band)), gap.size
        return numbers

    def diagnose(self, records: Sequence[Compared]) -> list[Finding]:
        return []

    def weigh(self, sums: np.ndarray) -> np.ndarray:
        return sums

    def judge(self, step: int, evidence: Mapping[Source, np.ndarray]) -> list[Alarm]:
        return [
            Alarm(
                replica=replica,
                since_step=step,
                actions=int(actions),
                text=f"{int(over)} of {int(actions)} actions are off by more than {self._band:g} "
                "nats, the pair's band",
            )
            for (replica, _), (over, actions) in sorted(evidence.items())
            if over
        ]

    def metrics(self) -> dict[str, float]:
        return {}

    def notes(self) -> list[str]:
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


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
