"""Which workers there are on which devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gcore_core.contract.placement import Window
from gcore_core.runtime.worker_settings import PlacementFacts


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Which workers of a role have which devices, and what the lead needs to ask the policy again.

    workers: role -> device indexes of each of its workers.
    window: what the policy was shown.
    moves: devices may change between generators, so the policy is asked before every step.
    sleeps: roles whose backend can sleep.
    resting: those of them that sleep while the trainer works.
    provider: the policy's, as in ``placement.use``.
    """

    workers: Mapping[str, list[list[int]]] = field(default_factory=dict)
    window: Window = field(default_factory=lambda: Window(devices=(), slots={}))
    moves: bool = False
    sleeps: Sequence[str] = ()
    resting: Sequence[str] = ()
    provider: str = ""

    def facts(self, needed: int, directory: str) -> PlacementFacts | None:
        """What the controllers need to ask the policy again; None where nothing moves."""
        if not self.moves:
            return None
        generators = [role for role, need in self.window.needs.items() if need.kind == "generator"]
        return PlacementFacts(
            devices=list(self.window.devices),
            slots=dict(self.window.slots),
            needs=dict(self.window.needs),
            engines={role: self.workers[role] for role in generators},
            sleeps=list(self.sleeps),
            needed=needed,
            directory=directory,
            provider=self.provider,
        )
