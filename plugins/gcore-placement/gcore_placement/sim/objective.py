"""Provides the emulated trainer's objective by name; the trainer itself has it built in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PolicyGradient:
    """Sums -advantage * logp over trained actions."""

    requires: frozenset[str] = frozenset()

    def __init__(self, config: None) -> None:
        pass

    def loss(
        self, columns: Mapping[str, Any], current: Mapping[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Returns (sum of the losses, ``weight``, metrics); there are no metrics."""
        trained = columns["mask"]
        logp = current["logp"][trained]
        return -(columns["advantage"][trained] * logp).sum(), self.weight(columns), {}

    def weight(self, columns: Mapping[str, Any]) -> Any:
        """Returns the number of trained actions, by which the sum of losses is divided."""
        return columns["mask"].sum().to(columns["rollout_logp"].dtype)
