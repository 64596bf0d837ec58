"""``core/band``: no action's log-prob may be off by more than the pair's band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore_core.contract.sentinel import Alarm, Compared, Finding, SentinelContext, Source


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
