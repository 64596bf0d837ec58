"""The coefficient of the entropy in the loss, which may follow a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_algorithms.config import EntropyTargetConfig


class EntropyCoefficient:
    """Keeps a coefficient c, and moves it after each step where there is a target.

    With e the mean entropy of the step's actions:

        c becomes c + change where e < target, else c - change, within [smallest, largest]
        the next step applies c where e < target, else 0

    So a step is judged by the entropy of the one before it: its own is known only when its forward
    passes are over. The first step applies c as it begins.

    Source: He et al., "Skywork Open Reasoner 1 Technical Report", arXiv:2505.22312, adaptive
    entropy control.

    applied: the coefficient of the present step.
    """

    def __init__(self, coefficient: float, settings: EntropyTargetConfig) -> None:
        self.applied = coefficient
        self._coefficient = coefficient
        self._settings = settings

    def observe(self, entropy: float) -> None:
        """Takes the mean entropy of a step's actions, in nats; does nothing without a target."""
        settings = self._settings
        if settings.target is None:
            return
        is_low = entropy < settings.target
        moved = self._coefficient + (settings.change if is_low else -settings.change)
        self._coefficient = min(max(moved, settings.smallest), settings.largest)
        self.applied = self._coefficient if is_low else 0.0

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with; empty without a target."""
        if self._settings.target is None:
            return {}
        return {"coefficient": self._coefficient, "applied": self.applied}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state`` returned; a run that now has no target keeps its settings."""
        if self._settings.target is None or not state:
            return
        self._coefficient = float(state["coefficient"])
        self.applied = float(state["applied"])
