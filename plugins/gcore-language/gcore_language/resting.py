"""Trainers that give their memory away in the rollout, on an engine that can."""

from __future__ import annotations

from typing import Protocol


class RestingEngine(Protocol):
    """An engine whose tensors can lie elsewhere for a while; see ``gcore_language.bed``."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's weights, optimizer and reference, as they are held now."""

    def sleep(self) -> None:
        """See ``SleepsInRollout.sleep``."""

    def wake(self) -> None:
        """See ``SleepsInRollout.wake``."""


class RestsInRollout:
    """A trainer with the capability "sleep".

    See ``gcore_core.contract.trainer.SleepsInRollout``.
    """

    _engine: RestingEngine

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, optimizer and reference, as they are held now."""
        return self._engine.memory_bytes

    def sleep(self) -> None:
        """See ``gcore_core.contract.trainer.SleepsInRollout.sleep``."""
        self._engine.sleep()

    def wake(self) -> None:
        """See ``gcore_core.contract.trainer.SleepsInRollout.wake``."""
        self._engine.wake()
